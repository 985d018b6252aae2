"""What a gateway process says of the workers, while its Bus answers and while it is away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from gateway.loads import loads
from wire.bus import BusError
from wire.messages import LoadSnapshot
from wire.redis_bus import RedisGatewayBus


class BusWithOutages(RedisGatewayBus):
    is_away = False

    async def loads(self) -> Sequence[LoadSnapshot]:
        if self.is_away:
            raise BusError("the Bus is away")
        return await super().loads()


async def test_an_outage_of_the_bus_is_shown_as_one_and_not_as_a_platform_without_workers(world: Any) -> None:
    runtime = world.new_runtime("gateway-2", BusWithOutages)
    await runtime.start()
    try:
        assert [load.worker_id for load in await loads()] == ["worker-1"]
        runtime.bus.is_away = True
        await world.until(lambda: not runtime.loads)
        with pytest.raises(BusError, match="the Bus is away"):
            await loads()
        async with httpx2.AsyncClient(base_url=world.base_url) as client:
            assert "rubato_bus_up 0" in (await client.get("/metrics")).text
        runtime.bus.is_away = False
        await world.until(lambda: bool(runtime.loads))
        assert [load.worker_id for load in await loads()] == ["worker-1"]
    finally:
        await runtime.stop()


async def test_who_looks_at_the_workers_sees_what_they_said_last_not_what_the_gateway_heard_last(world: Any) -> None:
    world.worker.beating = False
    for step in (4_001, 4_002, 4_003):  # quicker than a gateway looks for itself
        world.worker.bus.publish_load(replace(world.worker.load(), step=step))
        assert [load.step for load in await loads()] == [step]
