"""Whether this process has the compiled decode attention, and its rows shared out among threads. Knows no loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

FLOATS_PER_THREAD = 1 << 18  # a thread reads no less than this in the time that another takes to wake


@functools.cache
def decode_attention() -> InPlace | None:
    """None without numba (the extra ``cpu``). The first call on a machine compiles, which takes seconds."""
    try:
        from gpu_worker.kernels.cpu_decode import compiled
    except ImportError:  # not installed, or not for this numpy
        return None
    return InPlace(compiled())


class InPlace:
    """Decode attention. Always: a row gets the same numbers alone, in a batch and on however many threads."""

    def __init__(self, attend: Callable[..., None]) -> None:
        self._attend = attend
        self._helpers: ThreadPoolExecutor | None = None  # start when first needed, and sleep between their shares

    def __call__(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        tables: NDArray[numpy.int32],
        contexts: NDArray[numpy.int32],
        out: Tensor,
    ) -> None:
        """``reference.attend_decode`` with the whole pool [blocks, L, S, 2, K, D] and a layer of it. Float32."""
        block_size, num_kv_heads, head_dim = pool.shape[2], *pool.shape[4:]
        pieces = pool.flatten(2).numpy()
        work = (queries.numpy(), pieces, layer, block_size, num_kv_heads, tables, contexts, out.numpy())
        num_threads = torch.get_num_threads()
        if num_threads > 1:
            num_floats = int(contexts.sum(dtype=numpy.int64)) * 2 * num_kv_heads * head_dim
            num_threads = min(num_threads, max(1, num_floats // FLOATS_PER_THREAD))
        own, *others = shares(contexts, num_kv_heads, num_threads)
        under_way = [self._threads().submit(self._attend, *work, *share) for share in others]
        self._attend(*work, *own)
        for share in under_way:
            share.result()

    def _threads(self) -> ThreadPoolExecutor:
        """torch's threads, which are as many, sleep meanwhile: the worker starts with ``OMP_WAIT_POLICY=PASSIVE``."""
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(torch.get_num_threads() - 1, thread_name_prefix="attention")
        return self._helpers


def shares(contexts: NDArray[numpy.int32], num_kv_heads: int, num_threads: int) -> Sequence[tuple[int, int]]:
    """Rows times key/value heads in ranges ``[first, last)`` of about the same contexts, one for each thread."""
    num_items = len(contexts) * num_kv_heads
    if num_threads == 1:
        return [(0, num_items)]
    read = numpy.cumsum(numpy.repeat(contexts, num_kv_heads), dtype=numpy.int64)
    cuts = numpy.searchsorted(read, read[-1] * numpy.arange(1, num_threads) // num_threads, side="right").tolist()
    return list(zip([0, *cuts], [*cuts, num_items], strict=True))
