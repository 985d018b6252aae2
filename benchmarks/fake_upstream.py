"""A server that answers every chat completion at once with the same body: it stands behind a gateway that is measured,
or in its place, so that what is left is the client's own.

Knows as much HTTP as a keep-alive client needs; refuses to know models. ``python -m benchmarks.fake_upstream PORT``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.serving import ROOT, free_port

START_LIMIT_S = 30.0

_BODY = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "river"}}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13},
    }
).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Its base URL without a path, until the block ends. Raises RuntimeError where it does not start."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.fake_upstream", str(port)], cwd=ROOT)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError("the fake upstream did not start")


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: a request's head, its body by its length, the answer, again."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, found, rest = head.partition(b"content-length:")
            if found:
                await reader.readexactly(int(rest.partition(b"\r\n")[0]))
            writer.write(_ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _run(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1])))
