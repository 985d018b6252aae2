"""The shedding ladder: what is taken from whom while the device cannot keep the promises of the classes above.

Knows waits against targets and who was refused of late; refuses to choose among requests (``admission``, ``value``).
"""

from __future__ import annotations

import enum
from collections import Counter

from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass

MAX_PAUSE_US = 900_000_000
_CALM_US = 2_000_000  # how long it must be quiet before a rung is left
_SUSTAINED_US = 500_000  # a burst that drains sooner is no overload
_LEAVE_PERCENT = 50


class Rung(enum.IntEnum):
    """How far up the ladder the engine stands; what a rung takes is taken by those above it too."""

    CALM = 0
    BATCH_PAUSED = 1  # no batch request is let in
    BATCH_SUSPENDED = 2  # batch computes nothing and has no floor
    DEFAULT_REFUSED = 3  # default requests were refused, or ended before their start, for lack of capacity
    INTERACTIVE_REFUSED = 4  # and interactive ones


_RUNG_OF_SHED = {
    PriorityClass.INTERACTIVE: Rung.INTERACTIVE_REFUSED,
    PriorityClass.DEFAULT: Rung.DEFAULT_REFUSED,
    PriorityClass.BATCH: Rung.BATCH_PAUSED,
}


class Overload:
    """Always: batch is paused at most ``MAX_PAUSE_US`` in one go; then it has its floor again until calm returns."""

    def __init__(self) -> None:
        self.rung = Rung.CALM
        self.paused_us = 0  # in all, while batch had work
        self.num_pauses = 0
        self.sheds: Counter[tuple[PriorityClass, Rung, RejectReason]] = Counter()
        self._late_since_us: int | None = None
        self._last_strained_us = 0
        self._paused_since_us: int | None = None
        self._last_us = 0
        self._last_shed_us: list[int | None] = [None for _ in PriorityClass]

    def note_shed(self, rank: int, reason: RejectReason, now_us: int, *, of_capacity: bool) -> None:
        """A request was refused, or ended before its start; ``of_capacity``: more capacity would have served it."""
        priority_class = PriorityClass(rank)
        if of_capacity:
            self._last_shed_us[rank] = now_us
        rung = max(self.rung, _RUNG_OF_SHED[priority_class]) if of_capacity else self.rung
        self.sheds[priority_class, rung, reason] += 1

    def settle(self, *, late_percent: int, batch_has_work: bool, now_us: int) -> None:
        """Once per plan. ``late_percent``: the worst estimated start of a class above batch, in % of its target."""
        if late_percent == 0 and self.rung is Rung.CALM:  # and so it stays
            self._last_us = self._last_strained_us = now_us
            self._late_since_us = None
            return
        if self.is_paused and batch_has_work:
            self.paused_us += now_us - self._last_us
        self._last_us = now_us
        strain = self._strain(late_percent, now_us)
        if strain >= self.rung or late_percent >= _LEAVE_PERCENT:
            self._last_strained_us = now_us
        if strain > self.rung or now_us - self._last_strained_us >= _CALM_US:
            self.rung = strain
            self._last_strained_us = now_us
        if self.rung is Rung.CALM:
            self._paused_since_us = None
        elif self._paused_since_us is None:
            self._paused_since_us = now_us
            self.num_pauses += 1

    def _strain(self, late_percent: int, now_us: int) -> Rung:
        """Refusals count while there is a queue to speak of: one with an impossible wish of its own strains nothing."""
        if late_percent <= 100:
            self._late_since_us = None
        elif self._late_since_us is None:
            self._late_since_us = now_us
        rung = Rung.CALM
        if self._late_since_us is not None and now_us - self._late_since_us >= _SUSTAINED_US:
            rung = Rung.BATCH_SUSPENDED if late_percent > 200 else Rung.BATCH_PAUSED
        for rank in (PriorityClass.DEFAULT, PriorityClass.INTERACTIVE):
            shed_us = self._last_shed_us[rank]
            if shed_us is not None and now_us - shed_us < _CALM_US and late_percent >= _LEAVE_PERCENT:
                rung = max(rung, _RUNG_OF_SHED[rank])
        return rung

    @property
    def is_paused(self) -> bool:
        """True while no batch request may be let in."""
        since_us = self._paused_since_us
        return since_us is not None and self._last_us - since_us < MAX_PAUSE_US

    @property
    def is_suspended(self) -> bool:
        """True while batch computes nothing at all, unless the step would be empty."""
        return self.is_paused and self.rung >= Rung.BATCH_SUSPENDED

    def takes_floor(self, rank: int) -> bool:
        """True while a class above is refused, or batch suspended: those below have no floor then, for as long as a
        pause may last.
        """
        if not self.is_paused:
            return False
        return self.rung >= (Rung.BATCH_SUSPENDED if rank == PriorityClass.BATCH else Rung.INTERACTIVE_REFUSED)
