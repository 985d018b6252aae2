"""What really happened, read off a recorded log as it is replayed: its tally, its traffic, how long steps took."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.replay.fitting import Load, StepModel, Weather, decodes_load, load_of
from gpu_worker.replay.record_log import Boot, Cancelled, Closed, Entry, Input, Stepped, Submitted
from gpu_worker.replay.rerun import Listener, request_of, result_of
from gpu_worker.replay.tally import Stretch, Tally
from scheduler_engine.cost import CostConstants
from scheduler_engine.events import StepEvents
from scheduler_engine.plan import DecodeColumns, StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.scheduler import Scheduler

_SIBLING_REFUSED = "sibling_refused"  # a cancel that another decision brought about: not part of the traffic


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that came from outside, and when."""

    at_us: int
    entry: Input


class Reality(Listener):
    """What really happened, and all that a run that might have been needs of it: once the log has been replayed and
    the model fitted.
    """

    def __init__(self, cost: CostConstants, bytes_per_block: int) -> None:
        self.tally = Tally()
        self.inputs: list[Moment] = []
        self.model = StepModel(cost, bytes_per_block)
        self.loads: list[Load] = []
        self.durations_us: list[int] = []
        self.ratios: list[float] = []  # of what steps lasted to what the model predicts
        self.began_us: list[int] = []
        self.within_us = self.between_us = 0  # sums of the loop's own time in a step, and from one to the next
        self._last: tuple[int, bool] = (0, False)
        self._result: StepResult | None = None
        self._now_us = 0

    def told(self, entry: Entry, engine: Scheduler) -> None:
        if isinstance(entry, Boot):
            self._now_us = entry.now_us
            return
        if isinstance(entry, Submitted):
            self.tally.submitted(request_of(entry), entry.at_us)
        if isinstance(entry, Submitted | Cancelled):
            self._now_us = max(self._now_us, entry.at_us)
        if isinstance(entry, Cancelled) and entry.reason == _SIBLING_REFUSED:
            return
        if not isinstance(entry, Boot | Stepped | Closed):
            self.inputs.append(Moment(entry.at_us if isinstance(entry, Submitted) else self._now_us, entry))

    def planned(self, plan: StepPlan, entry: Stepped) -> None:
        self._result = result_of(plan, entry)
        if not plan.is_empty:
            self._measure(load_of(plan), entry)

    def _measure(self, load: Load, entry: Stepped) -> None:
        """A step that was not empty."""
        self.loads.append(load)
        self.durations_us.append(entry.duration_us)
        self.began_us.append(entry.planned_us)
        self.model.observe(load, entry.duration_us)
        self.within_us += entry.applied_us - entry.planned_us - entry.duration_us
        last_us, was_busy = self._last
        if was_busy:
            self.between_us += entry.planned_us - last_us
        self._last = (entry.applied_us, True)

    def applied(self, plan: StepPlan, events: StepEvents, entry: Stepped, engine: Scheduler) -> None:
        self._now_us = entry.applied_us
        self._last = (entry.applied_us, not plan.is_empty)
        if self._result is not None:
            self.tally.stepped(plan, self._result, events, engine, entry.planned_us, entry.applied_us)

    def decoded(self, decodes: DecodeColumns, entries: Sequence[Stepped]) -> None:
        first, last = entries[0], entries[-1]
        num_rows, num_attended = len(decodes), decodes.num_attended
        for entry in entries:
            self._measure(decodes_load(num_rows, num_attended), entry)
            num_attended += num_rows
        self._now_us = last.applied_us
        busy_us = sum([entry.duration_us for entry in entries])
        times_us = first.planned_us, first.applied_us, last.applied_us
        self.tally.decoded(Stretch(decodes.request_ids, len(entries), busy_us, *times_us))

    def close(self) -> None:
        """The log has been told: what runs that might have been need is made ready, once for all of them."""
        self.model.fit()
        self.ratios = [
            duration_us / max(1.0, self.model.predict_us(load))
            for load, duration_us in zip(self.loads, self.durations_us, strict=True)
        ]
        self.loads.clear()
        self.durations_us.clear()

    def weather(self, draw: int) -> Weather:
        return Weather(self.began_us, self.ratios, draw)

    @functools.cached_property
    def typical_lengths(self) -> dict[tuple[PriorityClass, str], int]:
        """Median output of a tenant in a class, over those that came to their own end."""
        found: dict[tuple[PriorityClass, str], list[int]] = {}
        for each in self.inputs:
            if isinstance(each.entry, Submitted):
                request = request_of(each.entry)
                length = self.tally.lengths.get(request.request_id)
                if length is not None:
                    found.setdefault((request.priority_class, request.tenant_id), []).append(length)
        return {key: sorted(lengths)[len(lengths) // 2] for key, lengths in found.items()}
