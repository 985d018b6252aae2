"""Whoever is told of a stop signal is told first, and takes nothing away from the server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from gateway.stop_signals import told_of_stop_signals


@pytest.fixture
def server_was_told() -> Iterator[list[int]]:
    """The server's handler for SIGTERM, as the list of what reached it."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    yield told
    signal.signal(signal.SIGTERM, before)


async def test_the_application_and_the_server_both_hear_of_a_stop_signal(server_was_told: list[int]) -> None:
    heard = asyncio.Event()
    with told_of_stop_signals(heard.set):
        signal.raise_signal(signal.SIGTERM)
        async with asyncio.timeout(2):
            await heard.wait()
    assert server_was_told == [signal.SIGTERM]


async def test_afterwards_the_server_alone_hears_of_it(server_was_told: list[int]) -> None:
    own = signal.getsignal(signal.SIGTERM)
    with told_of_stop_signals(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not own
    assert signal.getsignal(signal.SIGTERM) is own


async def test_a_handler_that_a_loop_set_is_kept(server_was_told: list[int]) -> None:
    loop = asyncio.get_running_loop()
    heard, served = asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, served.set)
    try:
        with told_of_stop_signals(heard.set):
            signal.raise_signal(signal.SIGTERM)
            async with asyncio.timeout(2):
                await heard.wait()
                await served.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_outside_the_main_thread_nothing_is_touched() -> None:
    own = signal.getsignal(signal.SIGTERM)

    async def serve(tell: Callable[[], None]) -> object:
        with told_of_stop_signals(tell):
            return signal.getsignal(signal.SIGTERM)

    assert await asyncio.to_thread(lambda: asyncio.run(serve(lambda: None))) is own
