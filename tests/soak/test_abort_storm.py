"""Clients that hang up at random moments, and a gateway that hangs up on all of them: nothing stays anywhere."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

import pytest
import redis

from tests.end_to_end.running_up import Up
from tests.soak.crowd import Crowd
from wire import codec
from wire.messages import LoadSnapshot
from wire.redis_keys import Keys

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=cpu-smollm2", "--kv-mib=96")  # slow enough that many leave in their prefill
NUM_STREAMS, NUM_AT_ONCE = 300, 60
EMPTY_LIMIT_S = 30.0
LONGEST_STAY_S = 6.0


async def test_of_three_hundred_dropped_streams_no_lease_record_reservation_or_block_is_left(platform: Up) -> None:
    # P15
    crowd = Crowd(platform, seed=2)
    chance = random.Random(3)
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int) -> None:
        tier = ("priority", "default", "flex")[number % 3]
        body = crowd.body(words=10 + number % 150, max_tokens=400, stream=True, service_tier=tier)
        async with gate:
            # The square makes most leave early: at the door, in the queue, in the prefill.
            crowd.outcomes[await crowd.ask_and_leave(client, body, LONGEST_STAY_S * chance.random() ** 2)] += 1

    async with crowd.client("aurora") as client:
        await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
    assert crowd.outcomes["left"] > NUM_STREAMS * 9 // 10

    await nothing_is_left(platform)


async def test_a_gateway_that_dies_with_long_answers_under_way_leaves_nothing_either(platform: Up) -> None:  # P19
    """The worker notices, cancels, and settles what it had made: nobody will ever ask for the rest."""
    crowd = Crowd(platform, seed=4)
    body = crowd.body(words=10, max_tokens=1_500, stream=True, service_tier="default")
    async with crowd.client("aurora") as client:
        asking = [asyncio.create_task(crowd.ask(client, body)) for _ in range(4)]
        await asyncio.sleep(3)
        killed = platform.pid_of("gateway")
        os.kill(killed, signal.SIGKILL)
        assert set(await asyncio.gather(*asking)) == {"broken"}
    await asyncio.to_thread(platform.wait_for, lambda: platform.pid_of("gateway") != killed)
    await nothing_is_left(platform)


async def nothing_is_left(platform: Up) -> None:
    with redis.Redis.from_url(platform.addresses["REDIS_URL"]) as gate_keeper:
        await _until(lambda: not list(gate_keeper.scan_iter("rubato:lease:*", _type="zset")))
        await _until(lambda: _is_empty(_load(gate_keeper)))
        records = [gate_keeper.hget(key, "state") for key in gate_keeper.scan_iter("rubato:response:*")]
        assert len(records) > 0
        assert set(records) == {b"done"}
    found = await asyncio.to_thread(platform.reconcile, 60)
    assert found["is_right"], (found["differences"], platform.said)
    assert found["gate"]["open_micros"] == found["ledger_money"]["open_micros"] == 0


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + EMPTY_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


def _load(gate_keeper: redis.Redis) -> LoadSnapshot | None:
    body = gate_keeper.get(Keys().load("worker-1"))
    return codec.decode_load(body) if isinstance(body, bytes) else None


def _is_empty(load: LoadSnapshot | None) -> bool:
    """Every block is free and nobody waits, runs or is paused."""
    if load is None or load.num_free_blocks != load.num_blocks:
        return False
    return not any(row.num_waiting or row.num_running or row.num_suspended for row in load.classes)
