"""The floor of device time below which no class with work may fall, over a window of ten seconds.

Knows service per class; refuses to know what the debt is paid with.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_engine.policy import ClassPolicy, PriorityClass

WINDOW_US = 10_000_000
_PAUSE_AFTER_SHED_US = 2_000_000


class Floors:
    """Always: a debt grows by floor x busy time while its class has work, shrinks by what the class got, and stays
    within plus or minus one window's floor. Kept in hundredths of a microsecond, so that percents are exact.
    """

    def __init__(self) -> None:
        self._debt = [0 for _ in PriorityClass]
        self._has_work = [False for _ in PriorityClass]
        self._last_shed_us: list[int | None] = [None for _ in PriorityClass]

    def note_shed(self, rank: int, now_us: int) -> None:
        """A request of the class was shed: classes below lose their floor for a while."""
        self._last_shed_us[rank] = now_us

    def settle(
        self, classes: Sequence[ClassPolicy], *, served_us: Sequence[int], has_work: Sequence[bool], now_us: int
    ) -> None:
        """One step has been charged: ``served_us`` per class; a class without work starts anew with full credit."""
        busy_us = sum(served_us)
        for rank, policy in enumerate(classes):
            window = policy.floor_percent * WINDOW_US
            if not has_work[rank] or not self._has_work[rank]:
                self._debt[rank] = -window
            else:
                floor_percent = 0 if self._is_shedding_above(rank, now_us) else policy.floor_percent
                debt = self._debt[rank] + floor_percent * busy_us - 100 * served_us[rank]
                self._debt[rank] = min(window, max(-window, debt))
            self._has_work[rank] = has_work[rank]

    def in_debt(self, rank: int, now_us: int) -> bool:
        """True when the class has work, has had less than its floor, and no class above is shedding."""
        return self._has_work[rank] and self._debt[rank] > 0 and not self._is_shedding_above(rank, now_us)

    def debt_us(self, rank: int) -> int:
        return max(0, self._debt[rank] // 100)

    def _is_shedding_above(self, rank: int, now_us: int) -> bool:
        return any(
            shed_us is not None and now_us - shed_us < _PAUSE_AFTER_SHED_US for shed_us in self._last_shed_us[:rank]
        )
