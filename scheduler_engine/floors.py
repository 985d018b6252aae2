"""The floor of device time below which no class with work may fall, over a window of ten seconds.

Knows service per class; refuses to know what the debt is paid with, and who is being shed (``overload``).
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_engine.overload import Overload
from scheduler_engine.policy import RANKS, ClassPolicy

WINDOW_US = 10_000_000


class Floors:
    """Always: a debt grows by floor x busy time while its class has work, shrinks by what the class got, and stays
    within plus or minus one window's floor. Kept in hundredths of a microsecond, so that percents are exact.
    """

    def __init__(self, overload: Overload) -> None:
        self._overload = overload
        self._debt = [0 for _ in RANKS]
        self._has_work = [False for _ in RANKS]

    def settle(self, classes: Sequence[ClassPolicy], *, served_us: Sequence[int], has_work: Sequence[int]) -> None:
        """One step has been charged: ``served_us`` per class; a class without work starts anew with full credit."""
        busy_us = sum(served_us)
        for rank, policy in enumerate(classes):
            window = policy.floor_percent * WINDOW_US
            works = has_work[rank] > 0
            if works and self._has_work[rank]:
                floor_percent = 0 if self._overload.takes_floor(rank) else policy.floor_percent
                debt = self._debt[rank] + floor_percent * busy_us - 100 * served_us[rank]
                self._debt[rank] = min(window, max(-window, debt))
            else:
                self._debt[rank] = -window
            self._has_work[rank] = works

    def in_debt(self, rank: int) -> bool:
        """True when the class has work, has had less than its floor, and no class above is shedding."""
        return self._has_work[rank] and self._debt[rank] > 0 and not self._overload.takes_floor(rank)

    def debts(self) -> list[bool]:
        """``in_debt`` of all classes."""
        return [debt > 0 and self.in_debt(rank) for rank, debt in enumerate(self._debt)]

    def debt_us(self, rank: int) -> int:
        return max(0, self._debt[rank] // 100)
