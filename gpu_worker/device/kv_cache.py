"""Two pools of KV blocks, device and host, and the copies between them. Knows blocks; refuses to know who owns them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.device.host_copies import HostCopies
from gpu_worker.kernels.choice import Kernels
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.batch import pool_shape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.target import Target
from scheduler_engine.plan import BlockCopy
from scheduler_engine.request import RequestId

STAGING_BYTES = 256 << 20  # each way, of a CUDA device's memory: what one step may send without waiting for the bus


class Copies(Protocol):
    """Whole blocks between a device and the host, bit by bit."""

    def swap_out(self, copies: Sequence[BlockCopy]) -> None: ...

    def swap_in(self, copies: Sequence[BlockCopy]) -> None: ...

    def finish(self) -> None: ...


class KvCache:
    """Always: both pools are [blocks, layers, block size, 2, KV heads, head dim] and contiguous, so that a block is one
    piece of memory and its copy is bit-equal; every number in the device pool is finite.

    A block that is swapped out may be written again at once. On a CPU, memory is zero pages of the system until a block
    is first written; on a CUDA device the host pool is pinned and copies run on streams of their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int = BLOCK_SIZE,
        target: Target | None = None,
    ) -> None:
        """``target``: a CPU in float32 unless given."""
        self.block_size = block_size
        shape = pool_shape(config, block_size).of_block
        if target is None or target.device.type == "cpu":
            self.device_pool, host_pool = _lazy_zeros(num_blocks, *shape), _lazy_zeros(num_host_blocks, *shape)
            self._copies: Copies = PlainCopies(self.device_pool, host_pool)
        else:
            self.device_pool = torch.zeros(num_blocks, *shape, dtype=target.dtype, device=target.device)
            host_pool = torch.empty(num_host_blocks, *shape, dtype=target.dtype, pin_memory=True)
            self._copies = _streamed(self.device_pool, host_pool, target.kernels)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Device to host, whole blocks."""
        self._copies.swap_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Host to device, whole blocks."""
        self._copies.swap_in(copies)

    def finish_copies(self) -> None:
        """Block until all bytes are where they were sent."""
        self._copies.finish()

    def measure_copy(self, num_blocks: int) -> None:
        """Bring as many blocks in as a calibration wants to time; only while nothing lives in the pools."""
        self.swap_in([BlockCopy(RequestId("calibration"), block, block) for block in range(num_blocks)])
        if self.device_pool.is_cuda:
            torch.cuda.synchronize()

    def scrub(self, device_blocks: Iterable[int]) -> None:
        """Forget numbers that are not finite: a masked slot still takes part in attention, times zero."""
        for block in device_blocks:
            self.device_pool[block].zero_()


class PlainCopies:
    """Between two pools in a CPU's memory. Always: done when a call returns."""

    def __init__(self, pool: Tensor, host_pool: Tensor) -> None:
        self._pool, self._host_pool = pool, host_pool

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._host_pool[copy.host_block].copy_(self._pool[copy.device_block])

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._pool[copy.device_block].copy_(self._host_pool[copy.host_block])

    def finish(self) -> None:
        """Nothing is ever under way."""


def _streamed(pool: Tensor, host_pool: Tensor, kernels: Kernels) -> HostCopies:
    from gpu_worker.device.cuda_device import CudaStream, new_stream

    slots = max(1, STAGING_BYTES // max(1, pool[0].nbytes))
    out, into = new_stream(), new_stream()
    return HostCopies(pool, host_pool, kernels, num_slots=slots, compute=CudaStream(), out=out, into=into)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype = torch.float32) -> int:
    """Of keys and values in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def _lazy_zeros(*shape: int) -> Tensor:
    """Pages that the system maps when they are first written. What malloc gives may be old pages, cleared at once.

    Large pages where the system has them: of blocks that lie scattered the addresses alone take a while to find.
    """
    num_bytes = math.prod(shape) * torch.float32.itemsize
    if not num_bytes:
        return torch.zeros(shape)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are never large
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
