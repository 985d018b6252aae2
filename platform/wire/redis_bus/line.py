"""Many callers on one connection: commands go out in the order they are called, and their answers come back in it.

The client library lends each command a connection of its own until its answer is there. On a shared one, what is called
at one time is one write and one read, for a third of the CPU. Refuses to know what commands mean; one that blocks does
not belong here, since it would hold up everybody's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

ANSWER_S = 5.0  # the longest silence while somebody waits


class Unreachable(exceptions.ConnectionError):
    """The command was surely not carried out: no connection could be opened, or Redis still loads what it held."""


class Line:
    """One connection, until it breaks. Always: whoever waits for an answer gets it, or is told why there is none."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.is_broken = False
        self._connection = connection
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._waiting: deque[asyncio.Future[Any]] = deque()  # in the order of their commands
        self._tasks = [asyncio.create_task(self._guarded(work)) for work in (self._send, self._receive, self._watch)]

    async def ask(self, *command: Any) -> Any:
        """Raises RedisError: that is the answer, or none came."""
        if self.is_broken:
            raise exceptions.ConnectionError("the connection broke as soon as it was opened")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent += self._connection.pack_command(*command)
        self._waiting.append(answer)
        self._has_unsent.set()
        return await answer

    async def _send(self) -> None:
        while await self._has_unsent.wait():
            self._has_unsent.clear()
            parts, self._unsent = self._unsent, []
            await self._connection.send_packed_command(parts, check_health=False)

    async def _receive(self) -> None:
        while True:
            try:
                reply = await self._connection.read_response(disconnect_on_error=False)
            except exceptions.ResponseError as error:
                reply = error
            except exceptions.BusyLoadingError as error:
                reply = Unreachable(str(error))
            answer = self._waiting.popleft()
            if answer.done():
                continue  # whoever asked has gone
            if isinstance(reply, exceptions.RedisError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    async def _watch(self) -> None:
        """Also where all who wait are gone before their time: one clock for all costs less than one for each."""
        oldest = None
        while not self._waiting or self._waiting[0] is not oldest:
            oldest = self._waiting[0] if self._waiting else None
            await asyncio.sleep(ANSWER_S / 2)
        raise exceptions.TimeoutError(f"no answer within {ANSWER_S:.0f} s")

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends one part ends the others: a part of a line answers nobody."""
        try:
            await work()
        except Exception as error:
            self._break(error)
            await self._connection.disconnect(nowait=True)

    def _break(self, why: Exception) -> None:
        kind = exceptions.TimeoutError if isinstance(why, exceptions.TimeoutError) else exceptions.ConnectionError
        self.is_broken = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(kind(f"{type(why).__name__}: {why}"))
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self._break(exceptions.ConnectionError("the connection was closed"))
        await asyncio.wait(self._tasks, timeout=ANSWER_S)
        await self._connection.disconnect(nowait=True)


class LineRedis(Redis):
    """The library's client with its plain commands and its scripts on one Line; pipelines and subscriptions have
    connections of the pool. Always: a command whose connection breaks is sent once more, on a new one; once closed,
    nothing is opened any more.
    """

    _line: Line | None = None
    _opening: asyncio.Task[Line] | None = None
    _is_closed = False

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Raises RedisError; Unreachable where nothing was carried out."""
        line = await self._open()
        try:
            reply = await line.ask(*args)
        except Unreachable:
            raise
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            reply = await self._ask_again(*args)
        understand = self.response_callbacks.get(args[0])
        if understand is None:
            return reply
        options.pop("keys", None)  # for the library's own cache
        return understand(reply, **options)

    async def _ask_again(self, *command: Any) -> Any:
        try:
            line = await self._open()
            return await line.ask(*command)
        except Unreachable as error:
            raise exceptions.ConnectionError(str(error)) from error  # the first may have arrived

    async def _open(self) -> Line:
        """Whoever finds it broken waits for the same new one. Raises Unreachable."""
        if self._line is not None and not self._line.is_broken:
            return self._line
        if self._is_closed:
            raise Unreachable("the client was closed")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._opened())
        opening = self._opening
        await asyncio.wait([opening])
        if opening.cancelled():
            raise Unreachable("the client was closed")
        return opening.result()

    async def _opened(self) -> Line:
        await self._hang_up()
        self._line = Line(await self._connected())
        return self._line

    async def _connected(self) -> AbstractConnection:
        """Without the library's time limit of one read: a line may be silent."""
        pool = self.connection_pool
        connection = pool.connection_class(**{**pool.connection_kwargs, "socket_timeout": None})
        try:
            async with asyncio.timeout(ANSWER_S):
                await connection.connect()  # type: ignore[no-untyped-call]  # the library brings no type here
        except Exception as error:
            await connection.disconnect(nowait=True)
            raise Unreachable(str(error) or f"no connection within {ANSWER_S:.0f} s") from error
        return connection

    async def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._hang_up()
        await super().aclose(close_connection_pool)
