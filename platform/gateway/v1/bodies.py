"""How many requests may wait for their bodies at once. Refuses to know what is sent.

Each of them holds one of the server's connections for as long as its body takes, and the server has a bounded number:
some stay free for those who ask without a body or have sent theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import Reason, invalid

AT_ONCE = 4_096  # half of the server's connections
OF_ONE_ADDRESS = 512  # a client that sends its bodies as fast as it can holds each for milliseconds


class UnderWay:
    """Always: an address's count is the number of its bodies between ``held``'s beginning and its end."""

    def __init__(self, at_once: int = AT_ONCE, of_one_address: int = OF_ONE_ADDRESS) -> None:
        self._at_once = at_once
        self._of_one_address = of_one_address
        self._of_address: Counter[str] = Counter()

    def num_of(self, address: str) -> int:
        return self._of_address[address]

    @contextmanager
    def held(self, address: str) -> Iterator[None]:
        """Raises InvalidRequest (503) for one too many."""
        if self._of_address[address] >= self._of_one_address or self._of_address.total() >= self._at_once:
            raise invalid(Reason.OVERLOADED, "Too many bodies are on their way here; please send the request again.")
        self._of_address[address] += 1
        try:
            yield
        finally:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]


under_way = UnderWay()
