"""Django's PostgreSQL backend with pools that go on as soon as the server does, and what such a pool is asked for.

The pool's own ways are slower: it waits 1, 2, 4 … seconds after each broken connection that it finds, tries a server
that refuses less and less often, up to minutes apart, and then not at all until somebody new comes. The driver's own
wait for an answer has no end: a server that is stopped, or dead behind something that acknowledges, is silent for ever.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from time import monotonic
from typing import Any, TypeVar

import psycopg
from django.db.utils import InterfaceError, OperationalError
from psycopg import AsyncConnection, Connection
from psycopg.abc import PQGen
from psycopg_pool import AsyncConnectionPool, ConnectionPool

Result = TypeVar("Result")

ANSWER_S = 5.0  # the longest wait for a connection
TRIAL_S = 2.0  # the longest silence after the nothing that a connection is tried with
MOST_WAITING = 200  # for a connection of one pool, each of them in a thread; who comes then is told at once
# The longest silence of a server that is at work: on a statement, or waiting for somebody else's lock. A gateway
# (gateway/asgi.py) gives up sooner than a process that may rightly ask for something long.
SILENCE_S = float(os.environ.get("DATABASE_SILENCE_S") or 300)
AWAY = (OperationalError, InterfaceError)  # what Django raises while the server does not answer


class Heard(Connection):
    """Always: a server of whom nothing came for ``silence_s`` while it was to answer has lost this connection.

    In the pool's own hands ``silence_s`` is short; who takes a connection for longer work gives it more.
    """

    silence_s = TRIAL_S

    def wait(self, gen: PQGen[Result], *args: Any, **kwargs: Any) -> Result:
        """As the driver's. Raises psycopg.OperationalError after a silence: what was asked may have been done."""
        return super().wait(_while_heard(self, gen), *args, **kwargs)


class HeardAsync(AsyncConnection):
    """``Heard`` for an asynchronous pool."""

    silence_s = ANSWER_S

    async def wait(self, gen: PQGen[Result], *args: Any, **kwargs: Any) -> Result:
        return await super().wait(_while_heard(self, gen), *args, **kwargs)


def _while_heard(connection: Heard | HeardAsync, asking: PQGen[Result]) -> Generator[Any, Any, Result]:
    try:
        wanted = next(asking)
        heard_at_s = monotonic()
        while True:
            ready = yield wanted  # 0 every tenth of a second in which nothing came
            if ready:
                heard_at_s = monotonic()
            elif monotonic() - heard_at_s >= connection.silence_s:
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"the server said nothing for {connection.silence_s:g} s")
            wanted = asking.send(ready)
    except StopIteration as done:
        result: Result = done.value
        return result


def check(connection: Connection) -> None:
    """What the pool hands out answers. One that was cut tells of all: the idle ones are made anew, and those in use
    are not kept when they come back. Raises psycopg.Error.
    """
    try:
        ConnectionPool.check_connection(connection)
    except Exception:
        if isinstance(connection._pool, ConnectionPool):
            connection._pool.drain()
        raise


async def check_async(connection: AsyncConnection) -> None:
    """``check`` for an asynchronous pool."""
    try:
        await AsyncConnectionPool.check_connection(connection)
    except Exception:
        if isinstance(connection._pool, AsyncConnectionPool):
            await connection._pool.drain()
        raise


def try_again(pool: ConnectionPool) -> None:
    """A pool that could not connect for ``reconnect_timeout`` begins anew, so whoever waits is served at the return."""
    pool.check()


async def try_again_async(pool: AsyncConnectionPool) -> None:
    """``try_again`` for an asynchronous pool."""
    await pool.check()


_BOTH: dict[str, Any] = {"min_size": 0, "timeout": ANSWER_S, "reconnect_timeout": 1.0, "open": False}
POOL_OPTIONS: dict[str, Any] = _BOTH | {
    "connection_class": Heard,
    "check": check,
    "reconnect_failed": try_again,
    "max_waiting": MOST_WAITING,
}
ASYNC_POOL_OPTIONS: dict[str, Any] = _BOTH | {
    "connection_class": HeardAsync,
    "check": check_async,
    "reconnect_failed": try_again_async,
}
