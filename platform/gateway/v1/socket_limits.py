"""How many frames one socket may send, and how many sockets one key may hold. Refuses to know what frames say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FRAMES_PER_S, FRAMES_AT_ONCE = 50, 200
SOCKETS_OF_A_KEY = 256  # on one gateway


class FrameRate:
    """A bucket of frames. Always: over any span at most FRAMES_AT_ONCE and FRAMES_PER_S for each of its seconds."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._left = float(FRAMES_AT_ONCE)
        self._at_s = clock_s()

    def take(self) -> bool:
        """False when this frame is one too many."""
        now_s = self._clock_s()
        self._left = min(float(FRAMES_AT_ONCE), self._left + (now_s - self._at_s) * FRAMES_PER_S)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class OpenSockets:
    """Always: a key's count is the number of its sockets between ``held``'s beginning and its end."""

    def __init__(self) -> None:
        self._of_key: Counter[str] = Counter()

    def num_of(self, key_id: str) -> int:
        return self._of_key[key_id]

    @contextmanager
    def held(self, key_id: str) -> Iterator[bool]:
        """Whether one more is within the limit."""
        self._of_key[key_id] += 1
        try:
            yield self._of_key[key_id] <= SOCKETS_OF_A_KEY
        finally:
            self._of_key[key_id] -= 1
            if not self._of_key[key_id]:
                del self._of_key[key_id]


open_sockets = OpenSockets()
