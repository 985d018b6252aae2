"""Time as a value that is handed in: monotonic microseconds, real or virtual."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Always: ``now_us`` never goes back."""

    def now_us(self) -> int: ...

    def sleep_us(self, duration_us: int) -> None: ...


class MonotonicClock:
    """The machine's own clock; its zero means nothing."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1_000

    def sleep_us(self, duration_us: int) -> None:
        time.sleep(duration_us / 1_000_000)


class VirtualClock:
    """Moves only when told to. Always: starts at 0."""

    def __init__(self) -> None:
        self._now_us = 0

    def now_us(self) -> int:
        return self._now_us

    def sleep_us(self, duration_us: int) -> None:
        self._now_us += duration_us
