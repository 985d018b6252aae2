"""Threads for database work beside the event loop. Never on the way of a token.

Knows that a thread leaves no connection behind; refuses to know what is asked of the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from channels.db import database_sync_to_async
from django.db import OperationalError, connections

from gateway.postgresql import MOST_WAITING

Result = TypeVar("Result")
NUM_THREADS = 4  # as many connections as a process may hold in one role
# Its threads are made when needed: enough for all who may wait.
_ASKING = ThreadPoolExecutor(2 * MOST_WAITING, thread_name_prefix="asking")


class DatabaseThreads:
    """Always: at most ``NUM_THREADS`` pieces of work at a time; who comes later waits its turn."""

    def __init__(self, longest_s: float | None = None) -> None:
        """``longest_s``: how long somebody waits for turn and answer together; None: as long as it takes."""
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="database")
        self._longest_s = longest_s

    async def run(self, work: Callable[[], Result]) -> Result:
        """Raises what ``work`` raises, and OperationalError after ``longest_s``: what has its turn then goes on, what
        has not is never begun.
        """
        try:
            async with asyncio.timeout(self._longest_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._pool, _leaving_nothing, work)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise OperationalError(f"no answer within {self._longest_s:g} s") from error

    def close(self) -> None:
        """Waits for what runs."""
        self._pool.shutdown()


async def asked(question: Callable[[], Result]) -> Result:
    """The answer, in a thread: nobody waits behind somebody else's question, but where the pools let nobody wait any
    more. Raises what ``question`` raises.
    """
    found: Result = await database_sync_to_async(question, thread_sensitive=False, executor=_ASKING)()
    return found


def _leaving_nothing(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        connections.close_all()
