"""A network that a test can take away: every byte between browser and gateway goes through here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from urllib.parse import urlsplit


class Cable:
    """A TCP relay on a loopback port. Always: while it is cut, what was open is closed and nothing comes through."""

    def __init__(self, base_url: str) -> None:
        self._port_behind = urlsplit(base_url).port
        self._is_cut = False
        self._lines: list[asyncio.StreamWriter] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._over.wait()
        server.close()
        self._close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port_behind)
        self._lines += [writer, far_writer]
        await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))

    def _close(self) -> None:
        for line in self._lines:
            line.transport.abort()
        self._lines.clear()

    def __enter__(self) -> Cable:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *given: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def cut(self) -> None:
        """Nothing comes through any more once this returns."""
        self._is_cut, done = True, threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._close(), done.set()))
        assert done.wait(10)

    def mend(self) -> None:
        self._is_cut = False


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    writer.close()
