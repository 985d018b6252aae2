"""A platform to measure: one that runs already, or a ``manage.py up`` of our own that ends with the block."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.figures import say

ROOT = Path(__file__).resolve().parent.parent
SERVING = "serving on http"
STOP_LIMIT_S = 60.0
SERVICES = ("DATABASE_URL", "DATABASE_TENANT_URL", "DATABASE_OWNER_URL", "REDIS_URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to send requests. ``base_url`` has no path; a key of None sends none."""

    base_url: str
    model: str
    keys: Mapping[str, str]
    data: Path | None = None  # its folder, where it is one of ours

    @property
    def port(self) -> int | None:
        return urlsplit(self.base_url).port


def of_demo_file(path: Path) -> Target:
    """The platform that wrote it. Raises OSError, ValueError."""
    demo = json.loads(path.read_text(encoding="utf-8"))
    return Target(base_url=demo["base_url"], model=demo["model"], keys=demo["keys"], data=path.parent)


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def own_platform(arguments: Sequence[str]) -> Iterator[Target]:
    """``manage.py up`` on a free port and an empty data folder. Raises RuntimeError with its last words."""
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as folder:
        data = Path(folder) / "data"
        command = [sys.executable, str(ROOT / "manage.py"), "up", f"--port={free_port()}", f"--data={data}"]
        environment = {name: value for name, value in os.environ.items() if name not in SERVICES}
        say(f"starting a platform: up {' '.join(arguments)}")
        process = subprocess.Popen(
            [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            _wait_until_serving(process)
            yield of_demo_file(data / "demo.json")
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_serving(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line.strip())
        if SERVING in line:
            break
    else:
        raise RuntimeError(f"the platform did not start: {' '.join(said[-3:])}")
    threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop it


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
