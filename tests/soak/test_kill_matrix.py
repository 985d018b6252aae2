"""kill -9 of each process under load: the supervisor heals it, and every token stays counted exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from tests.end_to_end.running_up import Up
from tests.soak.crowd import Crowd

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy", "--kv-mib=8")
LOAD_BEFORE_S, LOAD_AFTER_S = 3.0, 3.0
SERVED_AGAIN_S = 30.0
SETTLED_S = 150.0  # what lost its gateway and its worker is released after 90 s


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("victim", ["gateway", "worker", "settler", "valkey", "postgres"])
async def test_after_the_kill_of_any_one_process_the_books_are_right_and_requests_are_served(
    platform: Up, victim: str, seed: int
) -> None:
    crowd = Crowd(platform, seed)
    async with crowd.busy():
        await asyncio.sleep(LOAD_BEFORE_S)
        assert crowd.outcomes["served"] > 0
        killed = platform.pid_of(victim)
        os.kill(killed, signal.SIGKILL)
        await asyncio.to_thread(platform.wait_for, lambda: platform.pid_of(victim) != killed)
        await asyncio.sleep(LOAD_AFTER_S)
    await _is_served_again(crowd)
    found = await asyncio.to_thread(_reconciled, platform)
    assert found["is_right"], found
    assert found["gate"]["open_micros"] == found["ledger_money"]["open_micros"] == 0, found
    assert found["num_open_alerts"] == 0
    assert found["engine"]["output_tokens"] > 0


def _reconciled(platform: Up) -> dict[str, Any]:
    """The books once they are right and nothing stands reserved any more, or as they are when that takes too long."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = platform.reconcile(drain_s=5)
        if (found["is_right"] and not found["ledger_money"]["open_micros"]) or time.monotonic() > deadline:
            return found


async def _is_served_again(crowd: Crowd) -> None:
    async with asyncio.timeout(SERVED_AGAIN_S), crowd.client("aurora") as client:
        body = crowd.body(words=10, max_tokens=4, service_tier="priority")
        while (outcome := await crowd.ask(client, body)) != "served":
            crowd.outcomes[outcome] += 1
