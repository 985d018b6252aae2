"""Long answers of Django's views under ASGI: bytes that lie on the disk, sent piece by piece beside the event loop.

A plain iterator would be read whole into memory there first.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable
from typing import IO

READ_BYTES = 262_144
IN_MEMORY_BYTES = 1_048_576


def spooled(lines: Iterable[str]) -> IO[bytes]:
    """All of them in a file without a name, so that no connection to the database waits for a slow reader."""
    content = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  # ``pieces`` closes it
    for line in lines:
        content.write(line.encode())
    content.seek(0)
    return content


async def pieces(content: IO[bytes]) -> AsyncIterator[bytes]:
    """From where it stands to its end; then it is closed."""
    with content:
        while piece := await asyncio.to_thread(content.read, READ_BYTES):
            yield piece
