"""A way to Redis that a test can spoil: connections that fall silent, as after a network's change, or are reset."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Middleman:
    """Always: what was open when ``fall_silent`` was called carries nothing any more, and what is opened later does."""

    def __init__(self, url: str) -> None:
        self.url = ""
        self.num_resets_left = 0  # of the next connections, each some moments after it was opened
        self.num_reset = 0
        self._there = urlsplit(url)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    def fall_silent(self) -> None:
        for task in self._tasks:
            task.cancel()

    def reset(self) -> None:
        """What is open now."""
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        self.fall_silent()
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._there.hostname, self._there.port)
        self._writers += (writer, back)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if self.num_resets_left > 0:
            self.num_resets_left -= 1
            self.num_reset += 1
            asyncio.get_running_loop().call_later(0.0004 * (self.num_reset % 8), writer.transport.abort)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(_carry(source, sink))
            self._tasks.add(task)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
        sink.close()


@asynccontextmanager
async def middleman(url: str) -> AsyncIterator[Middleman]:
    """Between a client and the Redis at ``url``."""
    found = Middleman(url)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    user = urlsplit(url).netloc.rpartition("@")[0]
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found.url = f"redis://{user}@{address}/0" if user else f"redis://{address}/0"
    try:
        yield found
    finally:
        server.close()
        found.close()
