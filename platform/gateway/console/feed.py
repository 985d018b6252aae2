"""One reading of the Bus for all who look at the live page, as encoded frames, one for each news of a worker.

Knows when to read and when to send; refuses to know who looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import orjson

from gateway.console.board import LiveBoard
from gateway.loads import Loads, books
from wire.bus import BusError

READ_PERIOD_US = 50_000
QUIET_PERIOD_US = 1_000_000  # a frame without news, so that a watcher can tell quiet from dead


def monotonic_us() -> int:
    return time.monotonic_ns() // 1_000


class LiveFeed:
    """Frames numbered from 1.

    Always: the Bus is read at most once per READ_PERIOD_US however many watch, and never while nobody does; a watcher
    that falls behind gets the newest frame next, and the ones between never.
    """

    def __init__(
        self,
        loads: Loads,
        clock_us: Callable[[], int] = monotonic_us,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._loads, self._clock_us, self._sleep = loads, clock_us, sleep
        self._board = LiveBoard()
        self._bus_up = True
        self._read_at_us: int | None = None
        self._sent_at_us = 0
        self._number = 0
        self._text = ""

    async def frame_after(self, number: int) -> tuple[int, str]:
        """Wait for a frame numbered above ``number``; 0 takes the first to come."""
        while True:
            await self._read_when_due()
            if self._number > number:
                return self._number, self._text
            await self._sleep(READ_PERIOD_US / 1_000_000)

    async def _read_when_due(self) -> None:
        now_us = self._clock_us()
        if self._read_at_us is not None and now_us - self._read_at_us < READ_PERIOD_US:
            return
        self._read_at_us = now_us  # before the await: the other watchers leave this reading to us
        was_up = self._bus_up
        try:
            loads = await self._loads()
        except BusError:
            self._bus_up, loads = False, ()
        else:
            self._bus_up = True
        news = self._board.hear(loads, now_us)
        if news or was_up != self._bus_up or not self._number or now_us - self._sent_at_us >= QUIET_PERIOD_US:
            self._encode(now_us)

    def _encode(self, now_us: int) -> None:
        self._number += 1
        self._sent_at_us = now_us
        frame = {**self._board.frame(now_us, bus_up=self._bus_up), "books": books.newest}
        self._text = orjson.dumps(frame).decode()
