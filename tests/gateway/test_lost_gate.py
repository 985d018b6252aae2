"""Redis loses what it held under a running gateway: 503 from the next request on, until the gate is built again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
from django.db import OperationalError

from gateway import background

HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def ask(world: Any) -> Any:
    return await world.client().chat.completions.create(model="simulated", messages=HI)


async def test_the_very_next_request_is_refused_for_now_and_holds_nothing(world: Any) -> None:
    await ask(world)
    world.redis.delete(world.redis_keys.gate_built)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(world)
    assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")
    assert caught.value.response.headers["retry-after"] == "1"
    assert world.slots_in_use() == 0
    assert len(world.worker.submits) == 1


async def test_the_gateway_has_the_gate_built_and_waits_out_a_database_that_is_away(world: Any) -> None:
    tries = []

    def build() -> bool:
        tries.append(len(tries))
        if len(tries) == 1:
            raise OperationalError("the database is away")
        world.redis.set(world.redis_keys.gate_built, 1)
        return True

    world.build_gate = build
    world.redis.delete(world.redis_keys.gate_built)
    await world.until(lambda: world.redis.exists(world.redis_keys.gate_built) == 1)
    assert tries == [0, 1]
    assert (await ask(world)).choices[0].message.content == "Hello, Aurora."


async def test_a_build_that_takes_longer_than_a_round_of_work_stays_the_only_one(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "ROUND_S", 0.05)
    begun, may_end = [], threading.Event()

    def build() -> bool:
        begun.append(len(begun))
        may_end.wait(5.0)
        world.redis.set(world.redis_keys.gate_built, 1)
        return True

    gateway = world.new_runtime("gateway-2")
    gateway._build_gate = build
    world.redis.delete(world.redis_keys.gate_built)
    keeping = background.Repeated(gateway._keep_gate, 0.0, again_s=0.0)
    keeping.start()
    await world.until(lambda: bool(begun))
    await asyncio.sleep(0.2)  # several rounds
    may_end.set()
    await world.until(lambda: world.redis.exists(world.redis_keys.gate_built) == 1)
    await keeping.stop()
    await gateway.redis.aclose()
    assert begun == [0]
