"""What the server in front of the gateway is told: connections that say nothing hold nobody up."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gateway.supervision.platform_processes import SERVER_OPTIONS

NUM_SILENT = 1_100  # more than the server's own default lets in
APPLICATION = """
async def application(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": kind + ".complete"})
            if kind.endswith("shutdown"):
                return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
"""


@contextlib.contextmanager
def granian(folder: Path, header_read_timeout_ms: int) -> Iterator[int]:
    """A server with the gateway's own options and a trivial application; yields its port."""
    (folder / "trivial.py").write_text(APPLICATION, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "granian", *SERVER_OPTIONS, f"--port={port}", "--log-level=error"]
    command += [f"--http1-header-read-timeout={header_read_timeout_ms}", "trivial:application"]
    process = subprocess.Popen(command, cwd=folder)
    try:
        deadline = time.monotonic() + 30
        while not is_served(port):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def is_served(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_more_silent_connections_than_the_server_likes_do_not_stop_it_and_are_closed(tmp_path: Path) -> None:
    with granian(tmp_path, header_read_timeout_ms=2_000) as port, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_SILENT)]
        assert is_served(port)
        assert all(map(is_closed, silent))
        assert is_served(port)


def test_the_image_tells_the_server_the_same(project_root: Path) -> None:
    (line,) = [one for one in (project_root / "Dockerfile").read_text().splitlines() if one.startswith("CMD ")]
    assert set(SERVER_OPTIONS) <= set(json.loads(line.removeprefix("CMD ")))
