"""A background response that nobody reads, on the whole platform: it outlives its gateway, and then its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import redis
from openai import AsyncOpenAI

from tests.end_to_end.running_up import Up
from wire.redis_keys import Keys

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=cpu-smollm2",)
NUM_TOKENS = 800  # some 38 s: a dead gateway is missed for 10 of them, and a reader would be waited for 15
ENDED_WITHIN_S = 180.0


@pytest.mark.parametrize("worker_dies_after_s", [None, 7.0])  # before anybody knows that the gateway is dead
async def test_a_background_answer_that_nobody_reads_outlives_what_serves_it(
    platform: Up, worker_dies_after_s: float | None
) -> None:
    demo = platform.demo
    victims = {name: platform.pid_of(name) for name in ("gateway", "worker")}
    client = AsyncOpenAI(base_url=demo["base_url"] + "/v1", api_key=demo["keys"]["aurora"], max_retries=5)
    async with client:
        made = await client.responses.create(
            model=demo["model"],
            input="Hi",
            background=True,
            max_output_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True},
        )
        await asyncio.sleep(2)  # it runs
        os.kill(victims["gateway"], signal.SIGKILL)
        if worker_dies_after_s is not None:
            await asyncio.sleep(worker_dies_after_s)
            os.kill(victims["worker"], signal.SIGKILL)
        await has_ended(platform, made.id.removeprefix("resp_"))
        ended = await client.responses.retrieve(made.id)
    assert ended.usage is not None, ended
    assert (ended.status, ended.usage.output_tokens) == ("incomplete", NUM_TOKENS)  # its length, as asked
    found = await asyncio.to_thread(platform.reconcile)
    assert found["is_right"], found
    assert found["gate"]["open_micros"] == found["ledger_money"]["open_micros"] == 0, found


async def has_ended(platform: Up, response_id: str) -> None:
    """Looked for in its record alone: nobody asks the API."""
    deadline = time.monotonic() + ENDED_WITHIN_S
    with redis.Redis.from_url(platform.addresses["REDIS_URL"]) as gate_keeper:
        while gate_keeper.hget(Keys().response(response_id), "state") != b"done":
            assert time.monotonic() < deadline, platform.said
            await asyncio.sleep(0.2)
