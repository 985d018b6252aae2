"""The whole platform behind its real server, for as long as one likes, with what nobody would write.

``make soak ARGS="-k fuzz"``; FUZZ_S sets how long (two minutes), FUZZ_SEED where the seeds begin. FUZZ_PER_S bounds how
many are sent a second, so that an hour may go on beside other work.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import httpx2
import psutil
import pytest

from tests.end_to_end.running_up import Up
from tests.gateway.spoiled import Fuzz
from tests.soak.test_abort_storm import nothing_is_left

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy",)
SECONDS = float(os.environ.get("FUZZ_S", 120))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 1_000))
PER_S = float(os.environ.get("FUZZ_PER_S", 10))
AT_ONCE = 4
SAY_EACH_S = 300.0
MOST_FAILURES = 20  # looked at in one run


async def test_no_spoiled_request_upload_or_socket_fails_or_hangs_and_the_books_agree_afterwards(platform: Up) -> None:
    gateway = platform.pid_of("gateway")
    # A backend of PostgreSQL ends with its connection, which an idle pool gives up after ten minutes.
    started = psutil.Process(platform.process.pid).children(recursive=True)
    processes = [one for one in started if one.name() != "postgres"]
    demo = platform.demo
    async with httpx2.AsyncClient(base_url=demo["base_url"]) as client:
        fuzz = Fuzz(client, demo["keys"]["aurora"], demo["model"])
        ends_at_s, say_at_s, seed = time.monotonic() + SECONDS, 0.0, FIRST_SEED
        failures: list[BaseException] = []
        while (now_s := time.monotonic()) < ends_at_s and len(failures) < MOST_FAILURES:
            if now_s >= say_at_s:
                _say(seed, fuzz, gateway)
                say_at_s = now_s + SAY_EACH_S
            several = [fuzz.one(seed + n) for n in range(AT_ONCE)]
            ended = await asyncio.gather(*several, asyncio.sleep(AT_ONCE / PER_S), return_exceptions=True)
            failures += [one for one in ended if isinstance(one, Exception)]
            seed += AT_ONCE
        _say(seed, fuzz, gateway)
    assert not failures, "\n".join(f"{type(one).__name__}: {one}" for one in failures)
    assert platform.pid_of("gateway") == gateway, "it has died and was started again"
    assert [one for one in processes if not one.is_running()] == []
    assert "Traceback" not in platform.said, platform.said[-20_000:]
    await nothing_is_left(platform)


def _say(seed: int, fuzz: Fuzz, gateway: int) -> None:
    """Shown with ``-s``: how far it has come, and how much memory the gateway has."""
    resident = sum(
        one.memory_info().rss for one in (psutil.Process(gateway), *psutil.Process(gateway).children(recursive=True))
    )
    outcomes = ", ".join(f"{name} {number}" for name, number in sorted(fuzz.outcomes.items()))
    sys.stderr.write(f"\nseeds to {seed}: gateway {resident >> 20} MiB; {outcomes}\n")
