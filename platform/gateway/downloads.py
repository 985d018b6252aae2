"""Long answers of Django's views under ASGI: bytes that lie on the disk, sent piece by piece beside the event loop,
and packed as one stream where a client takes gzip.

A plain iterator would be read whole into memory there first.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterable
from gzip import GzipFile
from io import BytesIO
from typing import IO, cast

from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware

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


class WholeGzip(GZipMiddleware):
    """Always: an answer is packed as one gzip member. Django's own makes one of each asynchronous piece, and most
    clients stop after the first, without an error.
    """

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        packable = isinstance(response, StreamingHttpResponse) and response.is_async
        packable = packable and not response.has_header("Content-Encoding")
        pieces = cast(StreamingHttpResponse, response).streaming_content if packable else None
        answer = super().process_response(request, response)
        if pieces is not None and answer.has_header("Content-Encoding"):
            cast(StreamingHttpResponse, answer).streaming_content = _packed(
                cast(AsyncIterator[bytes], pieces), "a" * secrets.randbelow(self.max_random_bytes)
            )
        return answer


async def _packed(pieces: AsyncIterator[bytes], padding: str) -> AsyncIterator[bytes]:
    """Each piece goes out as it came. ``padding`` hides the content's length, as in Django's answers."""
    packed = BytesIO()

    def pack(piece: bytes) -> None:
        packer.write(piece)
        packer.flush()

    with GzipFile(padding, "wb", 6, packed, mtime=0) as packer:
        async for piece in pieces:
            await asyncio.to_thread(pack, piece)
            yield _taken(packed)
    yield _taken(packed)


def _taken(packed: BytesIO) -> bytes:
    """What stands in it, which it holds no longer."""
    found = packed.getvalue()
    packed.seek(0)
    packed.truncate()
    return found
