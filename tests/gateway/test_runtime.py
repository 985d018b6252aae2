"""What a gateway process says while its Bus is away."""

from __future__ import annotations

from collections.abc import Sequence
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
