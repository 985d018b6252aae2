"""The most memory the running requests will need at once, if each ends where it is expected to.

Knows token counts and expected ends on a clock that ticks once per step; refuses to know blocks and pools. A running
request that has ``have`` tokens now and ``remaining`` to come has ``base + t`` tokens at clock t until it ends at
``finish = clock + remaining``, with ``base = have - clock`` for its whole life: nothing has to be moved while it
decodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import LiveRequest
from scheduler_engine.policy import PriorityClass


class PeakBook:
    """Always: holds exactly the requests that own device blocks (running or held), each at its base."""

    def __init__(self, block_size: int) -> None:
        self.clock = 0
        self._block_size = block_size
        self._counts: tuple[dict[int, int], ...] = tuple({} for _ in PriorityClass)  # finish -> requests
        self._bases: tuple[dict[int, int], ...] = tuple({} for _ in PriorityClass)  # finish -> sum of their bases

    def tick(self) -> None:
        """Every decode has gained one token."""
        self.clock += 1

    def add(self, live: LiveRequest) -> None:
        """Enter with its current total and estimated end."""
        remaining = max(0, live.estimated_total - live.total)
        live.peak_finish = self.clock + remaining
        live.peak_base = self._padded(live.total, remaining) - remaining - self.clock
        counts, bases = self._counts[live.rank], self._bases[live.rank]
        counts[live.peak_finish] = counts.get(live.peak_finish, 0) + 1
        bases[live.peak_finish] = bases.get(live.peak_finish, 0) + live.peak_base

    def remove(self, live: LiveRequest) -> None:
        counts, bases = self._counts[live.rank], self._bases[live.rank]
        left = counts[live.peak_finish] - 1
        if left:
            counts[live.peak_finish] = left
            bases[live.peak_finish] -= live.peak_base
        else:
            del counts[live.peak_finish]
            del bases[live.peak_finish]

    def peak_blocks(self, rank: int, *, have: int, remaining: int) -> int:
        """Blocks at the highest point if one more request came in, over classes at least as urgent as ``rank``.

        O(n log n) in distinct expected ends; asked only when a head is tried.
        """
        steps: dict[int, tuple[int, int]] = {}
        for counts, bases in zip(self._counts[: rank + 1], self._bases[: rank + 1], strict=True):
            for finish, count in counts.items():
                known_count, known_base = steps.get(finish, (0, 0))
                steps[finish] = (known_count + count, known_base + bases[finish])
        finish = self.clock + remaining
        known_count, known_base = steps.get(finish, (0, 0))
        new_base = self._padded(have, remaining) - remaining - self.clock
        steps[finish] = (known_count + 1, known_base + new_base)
        return -(-self._highest(steps) // self._block_size)

    def _highest(self, steps: dict[int, tuple[int, int]]) -> int:
        highest = total_count = total_base = 0
        for finish in sorted(steps, reverse=True):
            count, base = steps[finish]
            total_count += count
            total_base += base
            highest = max(highest, total_base + total_count * max(finish, self.clock))
        return highest

    def _padded(self, have: int, remaining: int) -> int:
        """Tokens at the end, rounded up to whole blocks: exact at a request's own end."""
        return -(-(have + remaining) // self._block_size) * self._block_size

    def check_books(self, holders: Iterable[LiveRequest]) -> None:
        """Raises BrokenBooks unless the sums are those of ``holders``."""
        counts: list[dict[int, int]] = [{} for _ in PriorityClass]
        bases: list[dict[int, int]] = [{} for _ in PriorityClass]
        for live in holders:
            counts[live.rank][live.peak_finish] = counts[live.rank].get(live.peak_finish, 0) + 1
            bases[live.rank][live.peak_finish] = bases[live.rank].get(live.peak_finish, 0) + live.peak_base
        if tuple(counts) != self._counts or tuple(bases) != self._bases:
            raise BrokenBooks("the peak book is not that of the requests on the device")
