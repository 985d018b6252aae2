"""The live picture: the newest LoadSnapshot of each worker, what changed over the last minute, and how old the news is.

Knows counters and moments; refuses to know sockets, pages and the clock: ``now_us`` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.console.frames import RECENT_WINDOW_US, Frame, Reading, worker_frame
from wire.messages import LoadSnapshot

RATE_WINDOW_US = 5_000_000
SAMPLE_PERIOD_US = 1_000_000
FORGET_AFTER_US = 120_000_000


@dataclass(slots=True)
class WorkerMemory:
    """One worker under one epoch. Always: ``samples`` is in order of time and spans the last minute, hardly more."""

    newest: LoadSnapshot
    heard_at_us: int
    samples: deque[Reading] = field(default_factory=deque)

    def hear(self, load: LoadSnapshot, now_us: int) -> None:
        self.newest, self.heard_at_us = load, now_us
        if not self.samples or now_us - self.samples[-1].at_us >= SAMPLE_PERIOD_US:
            self.samples.append(Reading(now_us, load))
        while len(self.samples) > 1 and self.samples[1].at_us <= now_us - RECENT_WINDOW_US:
            self.samples.popleft()

    def frame(self, now_us: int) -> Frame:
        newest = Reading(self.heard_at_us, self.newest)
        return worker_frame(
            newest, self._reading_before(RATE_WINDOW_US), self._reading_before(RECENT_WINDOW_US), now_us
        )

    def _reading_before(self, window_us: int) -> Reading:
        """The newest sample that is at least ``window_us`` older than the last news, else the oldest."""
        chosen = self.samples[0]
        for sample in self.samples:
            if sample.at_us > self.heard_at_us - window_us:
                break
            chosen = sample
        return chosen


class LiveBoard:
    """All workers as an operator sees them.

    Always: a worker that falls silent stays, with its last numbers and their age, for two minutes more.
    """

    def __init__(self) -> None:
        self._workers: dict[str, WorkerMemory] = {}

    def hear(self, loads: Sequence[LoadSnapshot], now_us: int) -> bool:
        """Take what the Bus gives now. True when any of it is news; a repeated snapshot is none."""
        changed = False
        for load in loads:
            known = self._workers.get(load.worker_id)
            if known is not None and (known.newest is load or known.newest == load):
                continue
            changed = True
            if known is None or known.newest.epoch != load.epoch:
                known = self._workers[load.worker_id] = WorkerMemory(load, now_us)
            known.hear(load, now_us)
        self._forget(now_us)
        return changed

    def frame(self, now_us: int, *, bus_up: bool = True) -> Frame:
        """The picture as JSON-ready data; durations in milliseconds, ages relative to ``now_us``."""
        workers = [self._workers[worker_id].frame(now_us) for worker_id in sorted(self._workers)]
        return {"at_ms": now_us // 1_000, "bus_up": bus_up, "workers": workers}

    def _forget(self, now_us: int) -> None:
        for worker_id, memory in list(self._workers.items()):
            if now_us - memory.heard_at_us > FORGET_AFTER_US:
                del self._workers[worker_id]
