"""Long answers of Django's views under ASGI: bytes that lie on the disk, sent piece by piece beside the event loop.

A plain iterator would be read whole into memory there first.
"""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import IO

READ_BYTES = 262_144
IN_MEMORY_BYTES = 1_048_576


def spooled(lines: Iterable[str]) -> IO[bytes]:
    """All of them in a file without a name, so that no connection to the database waits for a slow reader."""
    content = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  # Pieces closes it
    for line in lines:
        content.write(line.encode())
    content.seek(0)
    return content


class Pieces:
    """From where it stands to its end. Always: the content is closed then, or with an answer that nobody read."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        weakref.finalize(self, content.close)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(self._content.read, READ_BYTES):
            yield piece
