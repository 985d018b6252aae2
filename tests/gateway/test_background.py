"""Work that goes on as long as its process: nothing it raises or waits for ends it, and each outage is told once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psycopg
import pytest
from django.db import DatabaseError, InterfaceError
from redis import exceptions

from gateway.auth import KeyStoreDown
from gateway.background import Repeated
from wire.bus import BusError

ERRORS: list[BaseException] = [
    BusError("no answer"),
    exceptions.ConnectionError("gone"),
    exceptions.TimeoutError("silent"),
    exceptions.ResponseError("READONLY"),
    DatabaseError("gone"),
    InterfaceError("closed"),
    psycopg.InterfaceError("closed"),
    KeyStoreDown("gone"),
    ConnectionResetError(104, "reset"),
    BrokenPipeError(32, "broken"),
    OSError(24, "too many open files"),
    TimeoutError(),
    RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
    AttributeError("NoneType"),
    AssertionError("not thought of"),
    asyncio.CancelledError("of something that the work waited for"),
]


class Rounds:
    """Work whose rounds do in turn what a test says, and nothing when all of that is done."""

    def __init__(self, *does: Callable[[], object]) -> None:
        self._does = iter(does)
        self.num_begun = self.num_ended = 0

    async def __call__(self) -> None:
        self.num_begun += 1
        found = next(self._does, lambda: None)()
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, asyncio.Future):
            await found
        self.num_ended += 1

    async def ended(self, number: int) -> None:
        async with asyncio.timeout(2.0):
            while True:
                if self.num_ended >= number:
                    return
                await asyncio.sleep(0)


@asynccontextmanager
async def repeated(rounds: Rounds, round_s: float = 30.0) -> AsyncIterator[Repeated]:
    work = Repeated(rounds, 0.0, name="rounds", again_s=0.0, round_s=round_s)
    work.start()
    try:
        yield work
    finally:
        await work.stop()


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
async def test_whatever_a_round_raises_the_next_one_is_begun_and_the_outage_is_told_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = Rounds(lambda: error, lambda: error, lambda: error)
    async with repeated(rounds):
        await rounds.ended(2)
    assert rounds.num_begun >= 5
    assert [record.levelno >= logging.WARNING for record in caplog.records] == [True]


async def test_the_next_outage_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(lambda: BusError("first"), lambda: None, lambda: RuntimeError("second"))
    async with repeated(rounds):
        await rounds.ended(2)
    assert len(caplog.records) == 2


async def test_a_round_that_waits_for_what_never_comes_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    rounds = Rounds(never, never)
    async with repeated(rounds, round_s=0.01):
        await rounds.ended(1)
    assert len(caplog.records) == 1


async def test_a_future_that_somebody_else_cancels_does_not_end_the_work() -> None:
    shared = never()
    rounds = Rounds(lambda: shared)
    async with repeated(rounds):
        await asyncio.sleep(0)
        shared.cancel()
        await rounds.ended(1)


async def test_work_that_swallows_its_cancel_ends_with_its_round() -> None:
    release = asyncio.Event()

    async def swallow() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await release.wait()

    work = Repeated(swallow, 0.0, name="swallow")
    work.start()
    await asyncio.sleep(0)
    stopping = asyncio.create_task(work.stop())
    await asyncio.sleep(0)
    release.set()
    async with asyncio.timeout(2.0):
        await stopping


async def test_work_that_is_cancelled_from_outside_ends() -> None:
    """As an event loop does at its end."""
    rounds = Rounds(never)
    work = Repeated(rounds, 0.0, name="rounds")
    work.start()
    await asyncio.sleep(0)
    (task,) = (one for one in asyncio.all_tasks() if one.get_name() == "rounds")
    task.cancel()
    async with asyncio.timeout(2.0):
        await asyncio.wait([task])
