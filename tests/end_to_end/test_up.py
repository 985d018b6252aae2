"""The whole platform as a person starts it: all alive, healed when killed, gone after Ctrl-C, itself again later."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

START_LIMIT_S = 90.0
PROCESSES = ("postgres", "valkey", "settler", "celery", "beat", "worker", "gateway")


class Up:
    """``manage.py up`` with the simulated executor, and all it said."""

    def __init__(self, root: Path, data: Path) -> None:
        self.data = data
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "manage.py", "up", f"--port={port}", f"--data={data}", "--executor=simulated"]
        given = ("DATABASE_URL", "DATABASE_TENANT_URL", "DATABASE_OWNER_URL", "REDIS_URL")
        environment = {name: value for name, value in os.environ.items() if name not in given}
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@pytest.fixture
def up(project_root: Path, tmp_path: Path) -> Iterator[Callable[[], Up]]:
    started: list[Up] = []

    def start() -> Up:
        started.append(Up(project_root, tmp_path / "data"))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def _models(demo: dict[str, Any], tenant: str = "aurora") -> int:
    key = demo["keys"][tenant]
    request = urllib.request.Request(f"{demo['base_url']}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_platform_starts_heals_stops_and_comes_back_as_it_was(up: Callable[[], Up]) -> None:
    first = up()
    first.wait_until_serving()
    demo = first.demo
    assert [name for name in PROCESSES if not re.search(rf"^{name} +\| ready after", first.said, re.MULTILINE)] == []
    assert stat.S_IMODE((first.data / "demo.json").stat().st_mode) == 0o600
    assert _models(demo) == 200
    assert "demo_" not in first.said  # no key is ever printed

    for name in ("gateway", "worker"):
        before = first.pid_of(name)
        os.kill(before, signal.SIGKILL)
        first.wait_for(lambda name=name, before=before: first.pid_of(name) != before)
    first.wait_for(lambda: _models(demo) == 200)

    family = [first.process.pid, *(child.pid for child in psutil.Process(first.process.pid).children(recursive=True))]
    assert first.stop() == 0
    assert [pid for pid in family if psutil.pid_exists(pid)] == []

    second = up()
    second.wait_until_serving()
    assert second.demo["keys"] == demo["keys"]
    assert second.demo["admin"] == demo["admin"]
    assert _models(second.demo) == 200
    gateway = psutil.Process(second.pid_of("gateway"))
    family_bytes = sum(one.memory_info().rss for one in [gateway, *gateway.children(recursive=True)])
    assert family_bytes < 250 << 20


def test_a_platform_that_was_killed_outright_leaves_nobody_and_starts_again(up: Callable[[], Up]) -> None:
    first = up()
    first.wait_until_serving()
    children = psutil.Process(first.process.pid).children(recursive=True)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    _, alive = psutil.wait_procs(children, timeout=40)
    assert alive == []
    second = up()
    second.wait_until_serving()
    assert second.demo["keys"] == json.loads((second.data / "demo.json").read_text())["keys"]
    assert _models(second.demo) == 200
