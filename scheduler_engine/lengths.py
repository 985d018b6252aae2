"""How long outputs turn out to be: a quantile of those seen, given how far one already came.

Knows output lengths; refuses to know whose.
"""

from __future__ import annotations

import bisect

_WINDOW = 64
_MIN_SAMPLES = 4
_QUANTILE_PERCENT = 80


class LengthHistory:
    """The last 64 output lengths of a class. Always: ``_sorted`` holds the same numbers as ``_ring``."""

    def __init__(self) -> None:
        self._ring: list[int] = []
        self._next = 0
        self._sorted: list[int] = []

    def observe(self, num_output: int) -> None:
        """A request came to its own end after ``num_output`` tokens."""
        if len(self._ring) < _WINDOW:
            self._ring.append(num_output)
        else:
            del self._sorted[bisect.bisect_left(self._sorted, self._ring[self._next])]
            self._ring[self._next] = num_output
            self._next = (self._next + 1) % _WINDOW
        bisect.insort(self._sorted, num_output)

    def estimate(self, *, num_output: int, limit: int) -> int:
        """Expected output tokens of one that already has ``num_output`` and may have ``limit``: the 0.8-quantile of
        those longer.

        Without enough history the limit itself; one longer than all that were seen is expected to need a quarter more.
        """
        if len(self._ring) < _MIN_SAMPLES:
            return limit
        first = bisect.bisect_right(self._sorted, num_output)
        num_longer = len(self._sorted) - first
        if num_longer == 0:
            return min(limit, num_output + max(16, num_output // 4))
        return min(limit, self._sorted[first + (num_longer - 1) * _QUANTILE_PERCENT // 100])
