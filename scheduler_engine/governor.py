"""The thrash governor: while too much of the device goes into switching, lower classes run fewer requests at once.

Knows time lost and time busy over ten seconds; refuses to know why anybody was pushed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from scheduler_engine.cost import FittedCost
from scheduler_engine.draft import Draft
from scheduler_engine.policy import RANKS, ClassPolicy, PriorityClass

_WINDOW_SECONDS = 10
_US = 1_000_000


def lost_ns(cost: FittedCost, draft: Draft) -> int:
    """Predicted device time of a step that switching costs: its copies, and what is computed once more."""
    copies_ns = sum(copy.cost_ns for copy in draft.copy_charges)
    again_ns = 0
    for live, count in draft.chunks:
        again = min(live.computed + count, live.computed_high) - live.computed
        if again > 0:
            again_ns += cost.prefill_ns(live.computed, again)
    return copies_ns + again_ns


class Governor:
    """Always: a class that is capped may run at least one request; the most urgent class is never capped."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._caps = [num_slots for _ in RANKS]
        self._seconds: deque[tuple[int, int]] = deque(maxlen=_WINDOW_SECONDS)  # (busy, lost) of each full second
        self._busy_us = 0
        self._lost_us = 0
        self._second = 0
        self.num_cuts = 0

    def cap(self, rank: int) -> int:
        """How many requests of the class may be in slots."""
        return self._caps[rank]

    def is_full(self, rank: int, num_in_slots: int) -> bool:
        """True when the class is capped and has reached it."""
        return self._caps[rank] < self._num_slots and num_in_slots >= self._caps[rank]

    @property
    def lost_per_mille(self) -> int:
        """Share of the last ten seconds' busy time that switching took."""
        busy_us = self._busy_us + sum(busy for busy, _ in self._seconds)
        lost_us = self._lost_us + sum(lost for _, lost in self._seconds)
        return lost_us * 1_000 // busy_us if busy_us else 0

    def settle(
        self,
        classes: Sequence[ClassPolicy],
        num_in_slots: Callable[[int], int],
        *,
        busy_us: int,
        lost_us: int,
        now_us: int,
    ) -> None:
        """One step has been charged. Caps move once a second: down by a fifth, up by one."""
        self._busy_us += busy_us
        self._lost_us += lost_us
        second = now_us // _US
        if second == self._second:
            return
        self._second = second
        lost = self.lost_per_mille
        self._seconds.append((self._busy_us, self._lost_us))
        self._busy_us = self._lost_us = 0
        for rank in range(len(classes) - 1, PriorityClass.INTERACTIVE, -1):
            num_running = num_in_slots(rank)
            if lost > 10 * classes[rank].governor_on_percent and num_running > 1:
                self._caps[rank] = max(1, min(self._caps[rank], num_running) * 4 // 5)
                self.num_cuts += 1
                self._seconds.clear()  # what was before the cut is no reason for another
                return
            if lost <= 10 * classes[rank].governor_off_percent:
                self._caps[rank] = min(self._num_slots, self._caps[rank] + 1)
