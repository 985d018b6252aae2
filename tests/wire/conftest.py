"""One small Bus under two implementations: every promise in test_bus_promises.py is kept by both."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from scheduler_engine.policy import PolicySnapshot, PriorityClass, snapshot_to_dict
from tests.loads import quiet_load
from wire.bus import FinishedOutput, GatewayBus, UsageReader, WorkerBus
from wire.memory_bus import MemoryHub
from wire.messages import ChoiceEnd, EngineCounters, Finished, LoadSnapshot, Submit, Tokens, Usage
from wire.redis_bus import Keys, RedisGatewayBus, RedisUsageReader, RedisWorkerBus, connect, write_policy


class MemoryWorld:
    """A Bus in memory on a clock that tests move."""

    def __init__(self) -> None:
        self.now_us = 0
        self.hub = MemoryHub(lambda: self.now_us, max_stream_length=10)

    def worker(self, worker_id: str = "w1") -> WorkerBus:
        return self.hub.worker(worker_id)

    def gateway(self, gateway_id: str = "g1") -> GatewayBus:
        return self.hub.gateway(gateway_id)

    def usage_reader(self) -> UsageReader:
        return self.hub.usage_reader()

    def set_policy(self, policy: PolicySnapshot) -> bool:
        return self.hub.set_policy(policy)

    def let_pass(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000


@dataclass
class RedisWorld:
    """A Bus on a real Valkey behind a prefix of its own. Time is moved by shortening the keys' remaining lives."""

    url: str
    keys: Keys = field(default_factory=lambda: Keys(f"test-{uuid.uuid4().hex}:"))
    max_stream_length: int = 10
    opened: list[RedisGatewayBus | RedisWorkerBus | RedisUsageReader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = connect(self.url)

    def worker(self, worker_id: str = "w1") -> RedisWorkerBus:
        bus = RedisWorkerBus(self.url, worker_id, keys=self.keys, max_stream_length=self.max_stream_length)
        self.opened.append(bus)
        return bus

    def gateway(self, gateway_id: str = "g1") -> RedisGatewayBus:
        bus = RedisGatewayBus(self.url, gateway_id, keys=self.keys, max_stream_length=self.max_stream_length)
        self.opened.append(bus)
        return bus

    def usage_reader(self) -> RedisUsageReader:
        reader = RedisUsageReader(self.url, keys=self.keys)
        self.opened.append(reader)
        return reader

    def set_policy(self, policy: PolicySnapshot) -> bool:
        document = json.dumps({"version": policy.version, "policy": snapshot_to_dict(policy), "prices": []})
        return write_policy(self.client, self.keys, version=policy.version, document=document)

    def let_pass(self, seconds: int) -> None:
        for key in list(self.client.scan_iter(f"{self.keys.prefix}*")):
            left_ms = cast(int, self.client.pttl(key))
            if left_ms > 0:
                self.client.pexpire(key, max(0, left_ms - seconds * 1_000))

    async def close(self) -> None:
        for bus in self.opened:
            if isinstance(bus, RedisGatewayBus):
                await bus.close()
            else:
                bus.close()
        for key in list(self.client.scan_iter(f"{self.keys.prefix}*")):
            self.client.delete(key)
        self.client.close()


BusWorld = MemoryWorld | RedisWorld


@pytest.fixture
async def redis_world(valkey_url: str) -> AsyncIterator[RedisWorld]:
    world = RedisWorld(valkey_url)
    yield world
    await world.close()


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[BusWorld]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    world = RedisWorld(request.getfixturevalue("valkey_url"))
    yield world
    await world.close()


class Make:
    """Messages with the fields a test does not care about filled in."""

    def submit(self, response_id: str = "r1", **changes: Any) -> Submit:
        fields: dict[str, Any] = {
            "response_id": response_id,
            "attempt": 1,
            "gateway_id": "g1",
            "tenant_id": "aurora",
            "project_id": "p1",
            "key_id": "k1",
            "priority_class": PriorityClass.INTERACTIVE,
            "model": "toy",
            "prompt_token_ids": (1, 2, 3),
        }
        return Submit(**{**fields, **changes})

    def tokens(self, response_id: str, first_index: int, token_ids: tuple[int, ...]) -> Tokens:
        return Tokens(
            worker_id="w1",
            epoch=1,
            step=first_index,
            response_ids=(response_id,),
            attempts=(1,),
            choices=(0,),
            first_indexes=(first_index,),
            token_ids=(token_ids,),
        )

    def output(self, token_ids: list[list[int]], response_id: str = "r1") -> FinishedOutput:
        finished = Finished(
            response_id=response_id,
            attempt=1,
            choices=tuple(ChoiceEnd(choice=index, reason="stop") for index in range(len(token_ids))),
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=sum(map(len, token_ids)),
            counters=EngineCounters(),
        )
        return FinishedOutput(finished, token_ids)

    def usage(self, response_id: str = "r1", **changes: Any) -> Usage:
        fields: dict[str, Any] = {
            "response_id": response_id,
            "attempt": 1,
            "tenant_id": "aurora",
            "project_id": "p1",
            "key_id": "k1",
            "priority_class": PriorityClass.INTERACTIVE,
            "model": "toy",
            "prompt_tokens": 100,
            "cached_tokens": 0,
            "output_tokens": 20,
            "terminal": "completed",
            "policy_version": 1,
            "price_version": 1,
            "counters": EngineCounters(),
        }
        return Usage(**{**fields, **changes})

    def load(self, worker_id: str = "w1", epoch: int = 1) -> LoadSnapshot:
        return quiet_load(
            worker_id=worker_id,
            epoch=epoch,
            model="toy",
            max_model_len=1_024,
            num_blocks=8,
            num_free_blocks=8,
            num_host_blocks=8,
            num_free_host_blocks=8,
            num_slots=4,
            num_free_slots=4,
            classes=(),
        )


@pytest.fixture
def make() -> Make:
    return Make()
