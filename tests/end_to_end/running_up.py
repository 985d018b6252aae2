"""``manage.py up`` as a child of a test, on a data folder and a port of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_LIMIT_S = 240.0  # a machine that tests share with other work is slow to start


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def environment_of_its_own() -> dict[str, str]:
    """Ours without the services that a test session may have named."""
    given = ("DATABASE_URL", "DATABASE_TENANT_URL", "DATABASE_OWNER_URL", "REDIS_URL")
    return {name: value for name, value in os.environ.items() if name not in given}


class Up:
    """``manage.py up`` with the simulated executor, and all it said. Always: its services are its own."""

    def __init__(self, root: Path, data: Path, *arguments: str) -> None:
        self.data = data
        self._root = root
        command = [sys.executable, "manage.py", "up", f"--port={free_port()}", f"--data={data}", "--executor=simulated"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            cwd=root,
            env=environment_of_its_own(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._lines.extend(lines)

    @property
    def said(self) -> str:
        return "".join(self._lines)

    @property
    def demo(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data / "demo.json").read_text())
        return found

    @property
    def addresses(self) -> dict[str, str]:
        """DATABASE_URL, REDIS_URL and their like."""
        found: dict[str, str] = json.loads((self.data / "services.json").read_text())
        return found

    def reconcile(self, drain_s: float = 60) -> dict[str, Any]:
        """What ``manage.py reconcile`` finds once the sides agree, or after ``drain_s``."""
        command = [sys.executable, "manage.py", "reconcile", "--json", f"--drain-s={drain_s}"]
        environment = {**os.environ, **self.addresses, "RUBATO_DATA": str(self.data)}
        done = subprocess.run(command, cwd=self._root, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip(), done.stderr
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def wait_for(self, condition: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def wait_until_serving(self) -> None:
        self.wait_for(lambda: "serving on" in self.said)

    def pid_of(self, name: str) -> int:
        """Of its newest life."""
        return int(re.findall(rf"^{name} +\| ready after .*\(pid (\d+),", self.said, re.MULTILINE)[-1])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join(5)
