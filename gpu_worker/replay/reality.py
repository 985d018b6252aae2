"""What really happened, read off a recorded log as it is replayed: its tally, its traffic, how long steps took."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gpu_worker.replay.fitting import Load, StepModel, Weather, decodes_load
from gpu_worker.replay.record_log import Boot, Cancelled, Closed, Entry, Input, Stepped, Submitted
from gpu_worker.replay.rerun import request_of
from gpu_worker.replay.seen import Decided, Decoded, Seen
from gpu_worker.replay.tally import Stretch, Tally
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId

_SIBLING_REFUSED = "sibling_refused"  # a cancel that another decision brought about: not part of the traffic


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that came from outside, and when."""

    at_us: int
    entry: Input


class Reality:
    """What really happened, and all that a run that might have been needs of it: once all of the log has been seen, and
    ``close`` called. Requests of ``elsewhere`` are traffic like any other, and count in another tally.
    """

    def __init__(
        self, cost: CostConstants, bytes_per_block: int, elsewhere: frozenset[RequestId] = frozenset()
    ) -> None:
        self.tally = Tally(elsewhere)
        self.inputs: list[Moment] = []
        self.model = StepModel(cost, bytes_per_block)
        self.loads: list[Load] = []
        self.durations_us: list[int] = []
        self.ratios: list[float] = []  # of what steps lasted to what the model predicts
        self.began_us: list[int] = []
        self.within_us = self.between_us = 0  # sums of the loop's own time in a step, and from one to the next
        self._last: tuple[int, bool] = (0, False)
        self._now_us = 0

    def see(self, seen: Seen) -> None:
        """One thing after the other, in order."""
        if isinstance(seen, Decoded):
            self._decoded(seen)
        elif isinstance(seen, Decided):
            self._decided(seen)
        else:
            self._told(seen)

    def _told(self, entry: Entry) -> None:
        if isinstance(entry, Boot):
            self._now_us = entry.now_us
            return
        if isinstance(entry, Submitted):
            self.tally.submitted(request_of(entry), entry.at_us)
        if isinstance(entry, Submitted | Cancelled):
            self._now_us = max(self._now_us, entry.at_us)
        if isinstance(entry, Cancelled) and entry.reason == _SIBLING_REFUSED:
            return
        if not isinstance(entry, Stepped | Closed):
            self.inputs.append(Moment(entry.at_us if isinstance(entry, Submitted) else self._now_us, entry))

    def _decided(self, seen: Decided) -> None:
        planned_us, applied_us, duration_us, load, events, waiting = seen
        if load is not None:
            self._measure(load, planned_us, applied_us, duration_us)
        self._now_us = applied_us
        self._last = (applied_us, load is not None)
        self.tally.stepped(load is None, duration_us, events, waiting, planned_us, applied_us)

    def _decoded(self, seen: Decoded) -> None:
        request_ids, num_attended, planned_us, applied_us, durations_us = seen
        num_rows = len(request_ids)
        for times_us in zip(planned_us, applied_us, durations_us, strict=True):
            self._measure(decodes_load(num_rows, num_attended), *times_us)
            num_attended += num_rows
        self._now_us = applied_us[-1]
        span_us = planned_us[0], applied_us[0], applied_us[-1]
        self.tally.decoded(Stretch(request_ids, len(durations_us), sum(durations_us), *span_us))

    def _measure(self, load: Load, planned_us: int, applied_us: int, duration_us: int) -> None:
        """A step that was not empty."""
        self.loads.append(load)
        self.durations_us.append(duration_us)
        self.began_us.append(planned_us)
        self.model.observe(load, duration_us)
        self.within_us += applied_us - planned_us - duration_us
        last_us, was_busy = self._last
        if was_busy:
            self.between_us += planned_us - last_us
        self._last = (applied_us, True)

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

    @property
    def request_ids(self) -> set[RequestId]:
        """Of all its traffic."""
        return {RequestId(each.entry.fields["request_id"]) for each in self.inputs if isinstance(each.entry, Submitted)}

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
