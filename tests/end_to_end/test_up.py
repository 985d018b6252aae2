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
STOP_LIMIT_S = 25.0  # of all of it, on a busy machine; a stream that nobody ends takes 30 on an idle one


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


def test_the_platform_heals_comes_back_as_it_was_and_leaves_nobody_however_it_ends(up: Callable[..., Up]) -> None:
    """Three lives on one data folder: the first is stopped, the second killed outright, the third interrupted."""
    first = up()
    first.wait_until_serving()
    demo = first.demo
    _is_complete(first)
    _heals(first)
    family = [first.process.pid, *(child.pid for child in psutil.Process(first.process.pid).children(recursive=True))]
    assert first.stop() == 0
    assert [pid for pid in family if psutil.pid_exists(pid)] == []

    second = up()
    second.wait_until_serving()
    assert (second.demo["keys"], second.demo["admin"]) == (demo["keys"], demo["admin"])
    assert _models(second.demo) == 200
    _is_small(second)
    children = psutil.Process(second.process.pid).children(recursive=True)
    second.process.send_signal(signal.SIGKILL)
    second.process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []

    third = up()
    third.wait_until_serving()
    assert third.demo["keys"] == demo["keys"]
    assert _models(third.demo) == 200
    _tells_a_stream_that_it_goes(third)


def _is_complete(platform: Up) -> None:
    silent = [name for name in PROCESSES if not re.search(rf"^{name} +\| ready after", platform.said, re.MULTILINE)]
    assert silent == []
    assert stat.S_IMODE((platform.data / "demo.json").stat().st_mode) == 0o600
    assert _models(platform.demo) == 200
    assert "demo_" not in platform.said  # no key is ever printed


def _heals(platform: Up) -> None:
    for name in ("gateway", "worker"):
        before = platform.pid_of(name)
        os.kill(before, signal.SIGKILL)
        platform.wait_for(lambda name=name, before=before: platform.pid_of(name) != before)
    platform.wait_for(lambda: _models(platform.demo) == 200)


def _is_small(platform: Up) -> None:
    gateway = psutil.Process(platform.pid_of("gateway"))
    family_bytes = sum(one.memory_info().rss for one in [gateway, *gateway.children(recursive=True)])
    assert family_bytes < 250 << 20


def _tells_a_stream_that_it_goes(platform: Up) -> None:
    with _long_stream(platform.demo) as stream:
        assert stream.readline().startswith(b"data: ")
        interrupted_at_s = time.monotonic()
        assert platform.stop() == 0
        assert time.monotonic() - interrupted_at_s < STOP_LIMIT_S
        assert b"This gateway is going away" in stream.read()


def test_up_offers_the_device_profiles_that_the_worker_knows() -> None:
    assert sorted(DEVICE_PROFILES) == sorted(DEVICES)
