"""What only a CUDA device has: streams, captured graphs, its memory. Thin, for no test here can run it.

Everything above it is tested on a CPU with stand-ins that are as late as they may be.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MARGIN_SHARE = 0.08  # of the device's memory, left to activations, captured graphs and the allocator's own waste


class CudaStream:
    """See ``host_copies.Stream``. Without a stream of its own it is the current one."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._mine()):
            work()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._mine())
        return CudaEvent(event)

    def wait_for(self, event: CudaEvent) -> None:
        self._mine().wait_event(event.event)

    def _mine(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()


def new_stream() -> CudaStream:
    """One beside the computation."""
    return CudaStream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


class CudaEvent:
    """See ``host_copies.Event``."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class GraphCapture:
    """See ``decode_graphs.Capture``. Always: all graphs share one memory pool, since one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward()  # what is made at a first call must exist before the capture
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def pool_bytes() -> int:
    """Free memory, once the weights are there, less the margin; 0 where nothing is left."""
    free, total = torch.cuda.mem_get_info()
    return max(0, free - int(MARGIN_SHARE * total))
