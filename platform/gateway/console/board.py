"""The live picture: the newest LoadSnapshot of each worker, what changed over the last minute, and how old the news is.

Knows counters and moments; refuses to know sockets, pages and the clock: ``now_us`` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.console.quantiles import quantile_ms, since
from wire.messages import ClassSnapshot, LoadSnapshot

RATE_WINDOW_US = 5_000_000
RECENT_WINDOW_US = 60_000_000
SAMPLE_PERIOD_US = 1_000_000
SILENT_AFTER_US = 2_000_000
FORGET_AFTER_US = 120_000_000

Frame = dict[str, Any]


@dataclass(slots=True)
class WorkerMemory:
    """One worker under one epoch. Always: ``samples`` is in order of time and spans the last minute, hardly more."""

    newest: LoadSnapshot
    heard_at_us: int
    samples: deque[tuple[int, LoadSnapshot]] = field(default_factory=deque)

    def hear(self, load: LoadSnapshot, now_us: int) -> None:
        self.newest, self.heard_at_us = load, now_us
        if not self.samples or now_us - self.samples[-1][0] >= SAMPLE_PERIOD_US:
            self.samples.append((now_us, load))
        while len(self.samples) > 1 and self.samples[1][0] <= now_us - RECENT_WINDOW_US:
            self.samples.popleft()

    def reading_before(self, window_us: int) -> tuple[int, LoadSnapshot]:
        """The newest sample that is at least ``window_us`` older than the last news, else the oldest."""
        chosen = self.samples[0]
        for sample in self.samples:
            if sample[0] > self.heard_at_us - window_us:
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
            if known is not None and known.newest == load:
                continue
            changed = True
            if known is None or known.newest.epoch != load.epoch:
                known = self._workers[load.worker_id] = WorkerMemory(load, now_us)
            known.hear(load, now_us)
        self._forget(now_us)
        return changed

    def frame(self, now_us: int, *, bus_up: bool = True) -> Frame:
        """The picture as JSON-ready data; durations in milliseconds, ages relative to ``now_us``."""
        workers = [_worker(self._workers[worker_id], now_us) for worker_id in sorted(self._workers)]
        return {"at_ms": now_us // 1_000, "bus_up": bus_up, "workers": workers}

    def _forget(self, now_us: int) -> None:
        for worker_id, memory in list(self._workers.items()):
            if now_us - memory.heard_at_us > FORGET_AFTER_US:
                del self._workers[worker_id]


def _worker(memory: WorkerMemory, now_us: int) -> Frame:
    load = memory.newest
    age_us = now_us - memory.heard_at_us
    rate_at_us, rate_load = memory.reading_before(RATE_WINDOW_US)
    elapsed_us = memory.heard_at_us - rate_at_us
    return {
        "id": load.worker_id,
        "epoch": load.epoch,
        "model": load.model,
        "state": _state(load, age_us),
        "age_ms": age_us // 1_000,
        "heard_at_ms": memory.heard_at_us // 1_000,
        "step": load.step,
        "step_age_ms": (load.last_step_age_us + age_us) // 1_000,
        "policy_version": load.policy_version,
        "slots": {"total": load.num_slots, "used": load.num_slots - load.num_free_slots},
        "device": {"total": load.num_blocks, "used": load.num_blocks - load.num_free_blocks},
        "host": {"total": load.num_host_blocks, "used": load.num_host_blocks - load.num_free_host_blocks},
        "output_per_s": _per_second(load.output_tokens_total - rate_load.output_tokens_total, elapsed_us),
        "prompt_per_s": _per_second(load.prompt_tokens_total - rate_load.prompt_tokens_total, elapsed_us),
        "busy_percent": _share(load.busy_us_total - rate_load.busy_us_total, elapsed_us),
        "classes": _classes(memory),
        "board": [
            [
                row.response_id,
                row.tenant_id,
                row.priority_class.label,
                row.state,
                row.num_blocks,
                row.num_computed_tokens,
                row.num_output_tokens,
            ]
            for row in load.board
        ],
    }


def _state(load: LoadSnapshot, age_us: int) -> str:
    if age_us > SILENT_AFTER_US:
        return "silent"
    if load.draining:
        return "draining"
    return "ready" if load.ready else "starting"


def _classes(memory: WorkerMemory) -> list[Frame]:
    rate_at_us, rate_load = memory.reading_before(RATE_WINDOW_US)
    _, minute_load = memory.reading_before(RECENT_WINDOW_US)
    before = {row.priority_class: row for row in rate_load.classes}
    minute = {row.priority_class: row for row in minute_load.classes}
    return [
        _class(row, before[row.priority_class], minute[row.priority_class], memory.heard_at_us - rate_at_us)
        for row in memory.newest.classes
    ]


def _class(now: ClassSnapshot, before: ClassSnapshot, minute: ClassSnapshot, elapsed_us: int) -> Frame:
    recent = since(now.ttft, minute.ttft)
    return {
        "class": now.priority_class.label,
        "waiting": now.num_waiting,
        "running": now.num_running,
        "suspended": now.num_suspended,
        "closed": now.closed,
        "retry_after_ms": None if now.retry_after_us is None else now.retry_after_us // 1_000,
        "ttft_recent_ms": [quantile_ms(recent, 50), quantile_ms(recent, 95)],
        "ttft_ms": [quantile_ms(now.ttft, 50), quantile_ms(now.ttft, 95)],
        "queue_wait_ms": [quantile_ms(now.queue_wait, 50), quantile_ms(now.queue_wait, 95)],
        "output_per_s": _per_second(now.output_tokens - before.output_tokens, elapsed_us),
        "preemptions": _summed((lever, count) for lever, _resource, count in now.preemptions),
        "preempted_by": _summed((resource, count) for _lever, resource, count in now.preemptions),
        "shed": _summed(now.shed),
    }


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for word, count in pairs:
        sums[word] = sums.get(word, 0) + count
    return sums


def _per_second(count: int, elapsed_us: int) -> float | None:
    """To one decimal; None until two readings lie a second apart, for a rate over less is noise."""
    if elapsed_us < SAMPLE_PERIOD_US:
        return None
    return round(count * 1_000_000 / elapsed_us, 1)


def _share(busy_us: int, elapsed_us: int) -> int | None:
    if elapsed_us < SAMPLE_PERIOD_US:
        return None
    return min(100, busy_us * 100 // elapsed_us)
