"""How many requests may wait long for their bodies at once. Refuses to know what is sent.

Each of them holds one of the server's connections, and the server has a bounded number: some stay free for those who
ask without a body or send theirs at once, however many they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import Reason, invalid

LATE_S = 1.0
AT_ONCE = 4_096  # half of the server's connections
OF_ONE_ADDRESS = 512


class LateBodies:
    """Always: an address's count is the number of its bodies that are on their way for longer than ``late_s``."""

    def __init__(self, at_once: int = AT_ONCE, of_one_address: int = OF_ONE_ADDRESS, late_s: float = LATE_S) -> None:
        self._at_once = at_once
        self._of_one_address = of_one_address
        self._of_address: Counter[str] = Counter()
        self.late_s = late_s

    def num_of(self, address: str) -> int:
        return self._of_address[address]

    def take(self, address: str) -> bool:
        """Whether one more may be late; where it may, ``release`` ends that."""
        if self._of_address[address] >= self._of_one_address or self._of_address.total() >= self._at_once:
            return False
        self._of_address[address] += 1
        return True

    def release(self, address: str) -> None:
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


late_bodies = LateBodies()


class Arrival:
    """One body on its way, in a ``with`` block. Always: counted from the moment when it is late to its end."""

    def __init__(self, address: str, counts: LateBodies) -> None:
        self._address = address
        self._counts = counts
        self._waiting: asyncio.Timeout | None = None
        self._is_counted = self._is_too_many = False

    def __enter__(self) -> Arrival:
        self._timer = asyncio.get_running_loop().call_later(self._counts.late_s, self._count)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        if self._is_counted:
            self._counts.release(self._address)

    def _count(self) -> None:
        self._is_counted = self._counts.take(self._address)
        self._is_too_many = not self._is_counted
        if self._is_too_many and self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError, and InvalidRequest (503) for a late body too many."""
        try:
            async with asyncio.timeout(0 if self._is_too_many else seconds) as self._waiting:
                yield
        except TimeoutError:
            if not self._is_too_many:
                raise
            words = "Too many bodies are late just now; please send the request again."
            raise invalid(Reason.OVERLOADED, words) from None
        finally:
            self._waiting = None
