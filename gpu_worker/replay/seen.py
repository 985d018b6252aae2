"""What a replay of a log shows, as values: so that another process may have replayed it.

Knows what ``Reality`` asks of a step; refuses to sum anything up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_worker.replay.fitting import Load, load_of
from gpu_worker.replay.record_log import Entry, Stepped
from gpu_worker.replay.rerun import Listener
from scheduler_engine.events import StepEvents
from scheduler_engine.plan import DecodeColumns, StepPlan
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler


class Waiting(NamedTuple):
    """Who waited after a step, as ``Scheduler.waiting_services`` tells it."""

    by_class: Sequence[Sequence[tuple[str, int]]]

    def waiting_services(self, priority_class: PriorityClass) -> Sequence[tuple[str, int]]:
        return self.by_class[priority_class]


class Decided(NamedTuple):
    """A step in which something may have been decided. ``load`` is None where it was empty."""

    planned_us: int
    applied_us: int
    duration_us: int
    load: Load | None
    events: StepEvents
    waiting: Waiting


class Decoded(NamedTuple):
    """Steps one after the other, each of which gave each of these one token; nobody waited. ``num_attended`` is that of
    the first.
    """

    request_ids: Sequence[RequestId]
    num_attended: int
    planned_us: Sequence[int]
    applied_us: Sequence[int]
    durations_us: Sequence[int]


Seen = Entry | Decided | Decoded


class Eye(Listener):
    """Tells what it sees, in order; an entry comes before what it brings about."""

    def __init__(self, tell: Callable[[Seen], None]) -> None:
        self._tell = tell
        self._load: Load | None = None

    def told(self, entry: Entry, engine: Scheduler) -> None:
        self._tell(entry)

    def planned(self, plan: StepPlan, entry: Stepped) -> None:
        self._load = None if plan.is_empty else load_of(plan)

    def applied(self, plan: StepPlan, events: StepEvents, entry: Stepped, engine: Scheduler) -> None:
        waiting = Waiting([engine.waiting_services(each) for each in PriorityClass])
        self._tell(Decided(entry.planned_us, entry.applied_us, entry.duration_us, self._load, events, waiting))

    def decoded(self, decodes: DecodeColumns, entries: Sequence[Stepped]) -> None:
        planned_us = [entry.planned_us for entry in entries]
        applied_us = [entry.applied_us for entry in entries]
        durations_us = [entry.duration_us for entry in entries]
        self._tell(Decoded(decodes.request_ids, decodes.num_attended, planned_us, applied_us, durations_us))
