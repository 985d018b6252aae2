"""The whole platform as a person starts it: all alive, healed when killed, gone after Ctrl-C, itself again later."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil

from gateway.supervision.platform_processes import DEVICE_PROFILES
from gpu_worker.simulated import DEVICES
from tests.end_to_end.running_up import Up

PROCESSES = ("postgres", "valkey", "settler", "celery", "beat", "worker", "gateway")
STOP_LIMIT_S = 8.0  # of all of it, on a busy machine; a stream that nobody ends takes 30


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


def _long_stream(demo: dict[str, Any]) -> Any:
    body = {
        "model": demo["model"],
        "messages": [{"role": "user", "content": "Hi"}],
        "max_completion_tokens": 2_000,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {demo['keys']['aurora']}", "Content-Type": "application/json"}
    address = f"{demo['base_url']}/v1/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers), timeout=20)


def test_the_platform_starts_heals_stops_and_comes_back_as_it_was(up: Callable[..., Up]) -> None:
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

    with _long_stream(second.demo) as stream:
        assert stream.readline().startswith(b"data: ")
        interrupted_at_s = time.monotonic()
        assert second.stop() == 0
        assert time.monotonic() - interrupted_at_s < STOP_LIMIT_S
        assert b"This gateway is going away" in stream.read()


def test_a_platform_that_was_killed_outright_leaves_nobody_and_starts_again(up: Callable[..., Up]) -> None:
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


def test_up_offers_the_device_profiles_that_the_worker_knows() -> None:
    assert sorted(DEVICE_PROFILES) == sorted(DEVICES)
