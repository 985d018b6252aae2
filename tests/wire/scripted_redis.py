"""A server that speaks Redis' protocol and says what a test tells it to: the faults that a real one shows seldom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

AT_ONCE_S = 2.0  # far below the time after which a silent connection is given up
Command = list[bytes]
Behave = Callable[[int, "Session", Command], Awaitable[None]]
"""What to do at the n-th connection (from 0) with a command that is not of the library's greeting."""


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop go on until it is so."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


class Session:
    """One client's connection as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def commands(self) -> AsyncIterator[Command]:
        """Each a list of texts behind their lengths."""
        while head := await self._reader.readline():
            yield [await self._text() for _ in range(int(head[1:]))]

    async def _text(self) -> bytes:
        length = int((await self._reader.readline())[1:])
        return (await self._reader.readexactly(length + 2))[:-2]

    async def say(self, text: bytes) -> None:
        self._writer.write(text)
        await self._writer.drain()

    async def echo(self, command: Command) -> None:
        await self.say(b"$%d\r\n%s\r\n" % (len(command[-1]), command[-1]))

    def hang_up(self) -> None:
        self._writer.close()


class ScriptedRedis:
    """Always: ``asked`` holds every command in the order in which it came, with the number of its connection."""

    def __init__(self, behave: Behave) -> None:
        self.url = ""
        self.num_connections = 0
        self.asked: list[tuple[int, Command]] = []
        self._behave = behave

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        session = Session(reader, writer)
        try:
            async for command in session.commands():
                if command[0] == b"CLIENT":
                    await session.say(b"+OK\r\n")
                else:
                    self.asked.append((number, command))
                    await self._behave(number, session, command)
        except ConnectionError:
            pass
        finally:
            session.hang_up()


@asynccontextmanager
async def scripted(behave: Behave) -> AsyncIterator[ScriptedRedis]:
    """One that listens for as long as the block lasts. Raises TimeoutError where that is not at once."""
    found = ScriptedRedis(behave)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(AT_ONCE_S):
            yield found
    finally:
        server.close()
