"""Work that a process does again and again for as long as it lives: one way for all of it.

Refuses to know what is done. A library raises what its documentation does not name (uvloop a RuntimeError where a
connection was reset under it), and a loop that such a thing ends leaves its process deciding by old news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar, cast

from django.db import DatabaseError, InterfaceError
from redis.exceptions import RedisError

from gateway.auth import KeyStoreDown
from wire.bus import BusError

log = logging.getLogger(__name__)
Result = TypeVar("Result")
OUTAGES = (BusError, RedisError, DatabaseError, InterfaceError, KeyStoreDown)  # told in a line; the rest as a fault
AGAIN_S = 0.25  # after a failure
ROUND_S = 30.0  # unless said otherwise: many times what a round takes, with every wait for a service in it
START_AGAIN_S = 1.0


async def waited_out(begin: Callable[[], Awaitable[Result]], name: str, again_s: float = START_AGAIN_S) -> Result:
    """What ``begin`` returns, asked again every ``again_s`` while there is an outage, which is told once. A process
    that ended instead would be taken for one that cannot run. Raises what else ``begin`` raises.
    """
    me, is_told = cast(asyncio.Task[None], asyncio.current_task()), False
    while True:
        try:
            return await begin()
        except OUTAGES as error:
            if me.cancelling():  # which what was asked may have swallowed
                raise asyncio.CancelledError from error
            if not is_told:
                log.warning("%s waits: %s", name, error)
            is_told = True
        await asyncio.sleep(again_s)


class Repeated:
    """One piece of work, round after round.

    Always: between ``start`` and ``stop`` no failure ends it, and a round that takes longer than ``round_s`` is given
    up; an outage is told once, however many rounds it takes.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[None]],
        period_s: float,
        *,
        name: str = "",
        again_s: float | None = None,
        round_s: float | None = None,
    ) -> None:
        """``period_s`` lies between two rounds, ``again_s`` (else AGAIN_S) between a failed one and the next."""
        self._work = work
        self._period_s = period_s
        self._again_s = AGAIN_S if again_s is None else again_s
        self._round_s = ROUND_S if round_s is None else round_s
        self._name = name or getattr(work, "__name__", "work")
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        """Until it is cancelled: also where the work swallows that, as the Redis client does while it connects. What
        the work itself waited for may have been cancelled too, and that is a failure like others.
        """
        me = cast(asyncio.Task[None], asyncio.current_task())
        while not me.cancelling():
            try:
                async with asyncio.timeout(self._round_s):
                    await self._work()
                self._is_failing = False
                await asyncio.sleep(self._period_s)
            except (Exception, asyncio.CancelledError) as error:
                if not me.cancelling():
                    self._tell(error)
                    await asyncio.sleep(self._again_s)

    def _tell(self, error: BaseException) -> None:
        if not self._is_failing:
            self._is_failing = True
            if isinstance(error, OUTAGES):
                log.warning("%s: no answer: %s", self._name, error)
            else:
                log.error("%s failed, and is tried again", self._name, exc_info=error)
