"""Tells the application that its process was asked to stop, at once and beside the server's own handling.

A server shuts the lifespan down only after the last connection has ended; a stream would hold it for minutes. Knows
signal handlers; refuses to know what is done about them.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def told_of_stop_signals(tell: Callable[[], None]) -> Iterator[None]:
    """Within it, ``tell`` is called in the running loop, and then the server's handler, on each stop signal.

    Does nothing outside the main thread, and leaves alone a signal that the server does not handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    chained = []
    for number in STOP_SIGNALS:
        previous = signal.getsignal(number)
        if callable(previous):
            handler = _before(previous, loop, tell)
            _install(number, handler)
            chained.append((number, handler, previous))
    try:
        yield
    finally:
        for number, handler, previous in chained:
            if signal.getsignal(number) is handler:
                _install(number, previous)


_Handler = Callable[[int, FrameType | None], object]


def _before(previous: _Handler, loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> _Handler:
    def handler(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(tell)
        previous(number, frame)

    return handler


def _install(number: signal.Signals, handler: _Handler) -> None:
    signal.signal(number, handler)
    signal.siginterrupt(number, False)  # as event loops set it; signal.signal undoes that
