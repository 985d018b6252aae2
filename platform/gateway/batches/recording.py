"""Database work of an owner: outages are waited out; ends are written in groups, one transaction for all that came."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gateway.batches import leases
from gateway.batches.leases import Answer, Lease
from gateway.database_threads import DatabaseThreads
from gateway.postgresql import AWAY

log = logging.getLogger(__name__)
Result = TypeVar("Result")
AGAIN_S = 0.5
MAX_GROUP = 256


async def patiently(threads: DatabaseThreads, work: Callable[[], Result]) -> Result:
    """The result, however long the database is away."""
    is_away = False
    while True:
        try:
            return await threads.run(work)
        except AWAY as error:
            if not is_away:
                log.warning("the database does not answer: %s", " ".join(str(error).split()))
            is_away = True
            await asyncio.sleep(AGAIN_S)


class NotWritten(Exception):
    """Something else than an outage or a fence kept an answer out of the database; the log says what."""


class Recorder:
    """Writes the ends of one batch's lines.

    Always: ``put`` returns once its answer is committed, or raises Fenced or NotWritten.
    """

    def __init__(self, lease: Lease, threads: DatabaseThreads) -> None:
        self._lease = lease
        self._threads = threads
        self._waiting: list[tuple[Answer, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, answer: Answer) -> None:
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="record answers")
        await asyncio.shield(written)

    async def close(self) -> None:
        """Until everything that was put is written."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            try:
                answers = [answer for answer, _ in group]
                await patiently(self._threads, partial(leases.record, self._lease, answers))
            except leases.Fenced as fenced:
                _tell(group, fenced)
            else:
                for _, written in group:
                    written.set_result(None)
            finally:
                _tell(group, NotWritten("these answers could not be written down"))


def _tell(group: list[tuple[Answer, asyncio.Future[None]]], error: Exception) -> None:
    """Whoever still waits is told; nobody may be waiting."""
    for _, written in group:
        if not written.done():
            written.set_exception(error)
            written.exception()
