"""Memory that lower classes leave free for what the classes above are likely to want soon.

Knows blocks held by class over the last ten seconds; refuses to know who asks. Lower classes plan below their mark by
this much; what already runs may grow into it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from scheduler_engine.policy import RANKS

_SAMPLE_US = 100_000
_NUM_SAMPLES = 100
_QUANTILE_PERCENT = 90
_MOST_DIVISOR = 7  # about 15 % of all blocks, at most
_ONE = 1_024
_INFLATION_MAX = 8 * _ONE
_REST_US = 200_000
_BURST = 32
_PER_SECOND = 2
_US = 1_000_000


class Headroom:
    """Always: 0 <= reserve <= a seventh of all blocks; nothing is kept from the most urgent class."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._rings: tuple[list[int], ...] = tuple([] for _ in RANKS)  # demand of the classes above
        self._sorted: tuple[list[int], ...] = tuple([] for _ in RANKS)
        self._next = 0
        self._sampled_us = -_SAMPLE_US
        self._held = [0 for _ in RANKS]
        self._rests_until_us = [0 for _ in RANKS]
        self._pressure = [Pressure() for _ in RANKS]

    def is_due(self, now_us: int) -> bool:
        return now_us - self._sampled_us >= _SAMPLE_US

    def sample(self, held: Sequence[int], now_us: int) -> None:
        """``held``: device blocks per class, now. Called when due; a longer silence counts once."""
        self._sampled_us = now_us
        above = 0
        for rank in RANKS:
            self._held[rank] = above
            self._observe(rank, above)
            above += held[rank]
        self._next = (self._next + 1) % _NUM_SAMPLES

    def _observe(self, rank: int, demand: int) -> None:
        ring, ordered = self._rings[rank], self._sorted[rank]
        if len(ring) < _NUM_SAMPLES:
            ring.append(demand)
        else:
            del ordered[bisect.bisect_left(ordered, ring[self._next])]
            ring[self._next] = demand
        bisect.insort(ordered, demand)

    def reserve(self, rank: int, now_us: int) -> int:
        """Blocks below its mark that a class leaves free: the 0.9-quantile of what the classes above held, less what
        they hold, more of it after repeated preemption.
        """
        ordered = self._sorted[rank]
        if not ordered:
            return 0
        usual = ordered[(len(ordered) - 1) * _QUANTILE_PERCENT // 100]
        wanted = max(0, usual - self._held[rank]) * self._pressure[rank].inflation(now_us) // _ONE
        return min(self._num_blocks // _MOST_DIVISOR, wanted)

    def note_pressure(self, rank: int, now_us: int) -> None:
        """A request of the class gave its memory to a class above."""
        self._pressure[rank].note(now_us)
        self._rests_until_us[rank] = now_us + _REST_US

    def is_resting(self, rank: int, now_us: int) -> bool:
        """True for a moment after the class gave memory to a class above: what comes back now would soon go again."""
        return now_us < self._rests_until_us[rank]


class Pressure:
    """How often a class had to give its memory: two times a second are usual, thirty-two in a burst. Beyond, each one
    makes the headroom a quarter larger; it shrinks again by one percent a second.
    """

    def __init__(self) -> None:
        self._tokens_us = _BURST * _US
        self._inflation = _ONE
        self._noted_us = 0
        self._shrunk_us = 0

    def note(self, now_us: int) -> None:
        self._tokens_us = min(_BURST * _US, self._tokens_us + _PER_SECOND * (now_us - self._noted_us))
        self._noted_us = now_us
        if self._tokens_us >= _US:
            self._tokens_us -= _US
        else:
            self._inflation = min(_INFLATION_MAX, self.inflation(now_us) * 5 // 4)

    def inflation(self, now_us: int) -> int:
        """In 1024ths, 1024 or more."""
        seconds = (now_us - self._shrunk_us) // _US
        self._shrunk_us += seconds * _US
        for _ in range(min(seconds, 300)):
            self._inflation -= self._inflation // 100
        self._inflation = max(_ONE, self._inflation)
        return self._inflation
