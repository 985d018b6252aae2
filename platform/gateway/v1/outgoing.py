"""What a websocket has still to send: in order, bounded, and watched for a client that does not read.

Knows frames and bytes; refuses to know what they say.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

MAX_WAITING_BYTES = 262_144  # then whoever has more to say waits, and its tokens stay token ids


class Outgoing:
    """Always: frames of one ``put`` stay together; at most MAX_WAITING_BYTES wait, and what one ``put`` brings.

    The server's own send may wait for ever on a client that does not read and cannot be cancelled, so it runs in a task
    of its own and nobody but that task waits for it.
    """

    def __init__(self, send: Callable[[str], Awaitable[None]], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock_s = clock_s
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._sending_since_s: float | None = None
        self._sent_at_s = clock_s()

    async def put(self, frames: Sequence[bytes]) -> None:
        """Waits while too much is waiting."""
        while not self._has_room.is_set():
            await self._has_room.wait()
        self._frames.extend(frames)
        self._num_bytes += sum(map(len, frames))
        if self._num_bytes > MAX_WAITING_BYTES:
            self._has_room.clear()
        if self._frames:
            self._is_empty.clear()
            self._arrived.set()

    async def run(self) -> None:
        """Sends for as long as the socket lives."""
        while True:
            await self._arrived.wait()
            while self._frames:
                frame = self._frames.popleft()
                self._num_bytes -= len(frame)
                self._sending_since_s = self._clock_s()
                await self._pass_on(frame.decode())
                self._sending_since_s, self._sent_at_s = None, self._clock_s()
                if self._num_bytes <= MAX_WAITING_BYTES // 2:
                    self._has_room.set()
            self._arrived.clear()
            self._is_empty.set()

    async def _pass_on(self, text: str) -> None:
        await self._send(text)

    async def beat(self, silence_s: float, frame: bytes) -> None:
        """Sends this frame whenever nothing has been sent for so long."""
        while True:
            left_s = self._sent_at_s + silence_s - self._clock_s()
            if left_s <= 0:
                await self.put([frame])
                await self.until_empty()
            else:
                await asyncio.sleep(left_s)

    async def until_empty(self) -> None:
        await self._is_empty.wait()

    async def until_stuck(self, limit_s: float) -> None:
        """Until one frame has been on its way for so long."""
        while True:
            since_s = self._sending_since_s
            left_s = limit_s if since_s is None else since_s + limit_s - self._clock_s()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, limit_s / 4))
