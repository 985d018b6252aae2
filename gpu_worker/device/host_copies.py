"""Blocks on their way between a device's pool and pinned memory of the host. Knows streams and events, no requests.

A block that leaves is first gathered into a staging slot, in the order of the computation, so that it may be written
again at once; the slow way over the bus goes on beside the computation. What fences then remain are here: a staging
slot is not taken before its transfer has completed, and a host block is not read before it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_worker.kernels.choice import Kernels
from scheduler_engine.plan import BlockCopy


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block until the work before it is done."""
        ...


class Stream(Protocol):
    """Work of a device, done in order, while the host goes on."""

    def run(self, work: Callable[[], None]) -> None: ...

    def record(self) -> Event: ...

    def wait_for(self, event: Any) -> None:
        """Later work starts when ``event``, of the same kind of streams, is done; the host does not wait."""
        ...


class HostCopies:
    """Always: bytes arrive as they left, whatever the order in which streams make progress."""

    def __init__(
        self,
        pool: Tensor,
        host_pool: Tensor,
        kernels: Kernels,
        *,
        num_slots: int,
        compute: Stream,
        out: Stream,
        into: Stream,
    ) -> None:
        """Both pools are [blocks, …]. ``num_slots``: blocks of staging each way, at least one."""
        self._pool, self._host_pool, self._kernels = pool, host_pool, kernels
        self._compute, self._out, self._into = compute, out, into
        self._slots_out = _Ring(num_slots, pool)
        self._slots_in = _Ring(num_slots, pool)
        self._arrives: dict[int, Event] = {}  # host block -> when it holds what was sent there last

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Returns when the copies are under way; work that is put on the compute stream later may overwrite blocks."""
        for first in range(0, len(copies), self._slots_out.size):
            self._send(copies[first : first + self._slots_out.size])

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Returns when the copies are under way; work that is put on the compute stream later finds them done."""
        for first in range(0, len(copies), self._slots_in.size):
            self._fetch(copies[first : first + self._slots_in.size])

    def finish(self) -> None:
        """Block until every copy has arrived."""
        for event in self._arrives.values():
            event.wait()
        self._arrives.clear()

    def _send(self, copies: Sequence[BlockCopy]) -> None:
        slots, staging = self._slots_out.take(len(copies))
        blocks = self._indexes(copy.device_block for copy in copies)
        self._compute.run(partial(self._kernels.gather_blocks, self._pool, blocks, staging))
        self._out.wait_for(self._compute.record())
        for copy, slot in zip(copies, staging, strict=True):
            self._out.run(partial(_copy, self._host_pool[copy.host_block], slot))
        done = self._out.record()
        self._slots_out.give(slots, done)
        self._arrives.update((copy.host_block, done) for copy in copies)

    def _fetch(self, copies: Sequence[BlockCopy]) -> None:
        slots, staging = self._slots_in.take(len(copies))
        for copy, slot in zip(copies, staging, strict=True):
            arrives = self._arrives.pop(copy.host_block, None)
            if arrives is not None:
                self._into.wait_for(arrives)
            self._into.run(partial(_copy, slot, self._host_pool[copy.host_block]))
        self._compute.wait_for(self._into.record())
        blocks = self._indexes(copy.device_block for copy in copies)
        self._compute.run(partial(self._kernels.scatter_blocks, self._pool, blocks, staging))
        self._slots_in.give(slots, self._compute.record())

    def _indexes(self, blocks: Iterable[int]) -> Tensor:
        return torch.tensor(list(blocks), dtype=torch.int32).to(self._pool.device)


class _Ring:
    """Staging slots taken in a circle. Always: a slot is handed out only when its last work is done."""

    def __init__(self, size: int, pool: Tensor) -> None:
        self.size = size
        self._slots = pool.new_empty((size, *pool.shape[1:]))
        self._next = 0
        self._busy: deque[tuple[range, Event]] = deque()  # oldest first

    def take(self, count: int) -> tuple[range, Tensor]:
        """So many slots side by side; ``count`` is at most ``size``."""
        first = self._next if self._next + count <= self.size else 0
        slots = range(first, first + count)
        while any(busy.start < slots.stop and slots.start < busy.stop for busy, _ in self._busy):
            self._busy.popleft()[1].wait()
        self._next = slots.stop
        return slots, self._slots[slots.start : slots.stop]

    def give(self, slots: range, done: Event) -> None:
        """The work on ``slots`` is over when ``done`` is."""
        self._busy.append((slots, done))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
