"""How the Bus speaks to Redis: time-outs, the single retry, scripts by name, stream entries as bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from wire import codec
from wire.bus import BusError
from wire.redis_bus.line import LineRedis
from wire.redis_keys import ENTRY_FIELD

MAX_STREAM_LENGTH = 100_000
MAX_ENTRIES_PER_READ = 512
MAX_BLOCK_S = 1.0  # of one blocking read; SOCKET_TIMEOUT_S must exceed it
SOCKET_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64  # of one client

_TIMEOUTS: dict[str, Any] = {
    "protocol": 2,
    "socket_timeout": SOCKET_TIMEOUT_S,
    "socket_connect_timeout": SOCKET_TIMEOUT_S,
}


def connect(url: str, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A synchronous client with the Bus's time-outs, or shorter ones, and its single retry."""
    timeouts = _TIMEOUTS | {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 1), **timeouts)


def connect_async(url: str) -> LineRedis:
    """The same for many callers in an event loop, on one connection: a command that blocks needs a client of its own.

    What takes a connection by itself (a pipeline, a subscription) waits its turn beyond MAX_CONNECTIONS; the library's
    own pool would refuse it, and a flood of requests would read as an outage.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=MAX_CONNECTIONS, timeout=SOCKET_TIMEOUT_S, retry=AsyncRetry(NoBackoff(), 1), **_TIMEOUTS
    )
    pool.connection_class = _steady(pool.connection_class)
    return cast(LineRedis, LineRedis.from_pool(pool))  # the library names its own class alone


def _steady(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same, with one kind of error for a connection that was reset: uvloop says RuntimeError to who writes on it,
    which the library neither tries again nor passes on as its own.
    """

    class Steady(kind):  # type: ignore[misc, valid-type]  # the kind comes with the URL: plain, TLS, or a socket's path
        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            try:
                await super().send_packed_command(*args, **kwargs)
            except RuntimeError as error:
                raise redis.exceptions.ConnectionError(str(error)) from error

    return Steady


def script(*names: str) -> str:
    """The texts of these Lua files as one script."""
    folder = resources.files("wire.redis_bus")
    return "".join(folder.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in names)


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Whatever Redis says or does not say becomes a BusError."""
    try:
        yield
    except RedisError as error:
        raise BusError(f"{type(error).__name__}: {error}") from error


def block_ms(timeout_s: float) -> int | None:
    """For BLOCK; None = do not wait, since BLOCK 0 would mean for ever."""
    return int(min(timeout_s, MAX_BLOCK_S) * 1_000) or None


def entries_of(reply: Any) -> list[tuple[bytes, bytes]]:
    """(entry id, body) of a read of one stream, in the shape of protocol 2. A deleted entry has no fields."""
    return [
        (entry_id, (fields or {}).get(ENTRY_FIELD, b"")) for _, entries in reply or () for entry_id, fields in entries
    ]


def decoded(found: Sequence[tuple[bytes, bytes]]) -> list[Any]:
    """The messages and BadEntries of these entries, in order."""
    return [message for entry_id, body in found for message in codec.decode(body, entry_id.decode())]
