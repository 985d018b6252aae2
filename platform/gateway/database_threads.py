"""A few threads for database work beside the event loop. Never on the way of a token.

Knows that a thread leaves no connection behind; refuses to know what is asked of the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import connections

Result = TypeVar("Result")
NUM_THREADS = 4  # as many connections as a process may hold in one role


class DatabaseThreads:
    """Always: at most ``NUM_THREADS`` pieces of work at a time; who comes later waits its turn."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="database")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Raises what ``work`` raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, _leaving_nothing, work)

    def close(self) -> None:
        """Waits for what runs."""
        self._pool.shutdown()


def _leaving_nothing(work: Callable[[], Result]) -> Result:
    try:
        return work()
    finally:
        connections.close_all()
