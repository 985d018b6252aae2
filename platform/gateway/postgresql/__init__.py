"""Django's PostgreSQL backend with pools that go on as soon as the server does, and what such a pool is asked for.

The pool's own ways are slower: it waits 1, 2, 4 … seconds after each broken connection that it finds, tries a server
that refuses less and less often, up to minutes apart, and then not at all until somebody new comes.
"""

from __future__ import annotations

from typing import Any

from django.db.utils import InterfaceError, OperationalError
from psycopg import AsyncConnection, Connection
from psycopg_pool import AsyncConnectionPool, ConnectionPool

ANSWER_S = 5.0  # the longest wait for a connection
AWAY = (OperationalError, InterfaceError)  # what Django raises while the server does not answer


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
POOL_OPTIONS: dict[str, Any] = _BOTH | {"check": check, "reconnect_failed": try_again}
ASYNC_POOL_OPTIONS: dict[str, Any] = _BOTH | {"check": check_async, "reconnect_failed": try_again_async}
