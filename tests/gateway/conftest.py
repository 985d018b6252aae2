"""A small world around the door: real Valkey, a worker that does what a test scripts, and the four tenants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import uvicorn
from openai import AsyncOpenAI

from gateway import runtime as gateway_runtime
from gateway.auth import StoredKey
from gateway.runtime import Runtime
from gateway.text import byte_text
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, cpu_classes, snapshot_to_dict
from tenants import api_keys
from tests.gateway.fake_worker import MODEL, FakeWorker
from wire.redis_bus import RedisGatewayBus, RedisUsageReader, connect_async, write_policy
from wire.redis_keys import Keys

BODY_LIMIT = 1_048_576


AURORA, BULK, NOVA, STRANGER = "aurora", "bulk", "nova", "stranger"


def cell(tenant_id: str, priority_class: PriorityClass, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=tenant_id, priority_class=priority_class, **limits)


WORLD_QUOTAS = (
    *(cell(AURORA, priority_class) for priority_class in PriorityClass),
    cell(BULK, PriorityClass.DEFAULT),
    cell(BULK, PriorityClass.BATCH),
    cell(NOVA, PriorityClass.DEFAULT, requests_per_minute=60, tokens_per_minute=6_000, concurrency=3),
)


@dataclass(slots=True)
class KeyShelf:
    """The key table without PostgreSQL."""

    stored: dict[str, StoredKey] = field(default_factory=dict)
    num_lookups: int = 0
    newest: int = 0  # of the policy that PostgreSQL would have

    async def newest_policy(self) -> int:
        return self.newest

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def note_used(self, key_ids: Sequence[str]) -> None: ...

    async def find(self, public_id: str) -> StoredKey | None:
        self.num_lookups += 1
        return self.stored.get(public_id)

    def issue(self, tenant_id: str, default_class: str = "default") -> str:
        new = api_keys.make("test")
        self.stored[new.public_id] = StoredKey(
            key_id=f"key-{tenant_id}",
            tenant_id=tenant_id,
            project_id=f"project-{tenant_id}",
            secret_sha256=new.secret_sha256,
            default_class=default_class,
            is_usable=True,
            expires_at_s=None,
        )
        return new.text


def policy_document(version: int, quotas: Sequence[TenantClassPolicy], prices: Sequence[int] = (1, 1, 2)) -> str:
    snapshot = PolicySnapshot(version=version, classes=cpu_classes(), tenants=tuple(quotas))
    rows = [
        {
            "model": MODEL,
            "priority_class": c.label,
            "token_kind": kind,
            "micros_per_million": price * 1_000_000,
        }
        for c in PriorityClass
        for kind, price in zip(("prompt", "cached", "output"), prices, strict=True)
    ]
    names = {t: {"slug": t, "name": t.title(), "timezone": "UTC"} for t in (AURORA, BULK, NOVA, STRANGER)}
    document = {"version": version, "policy": snapshot_to_dict(snapshot), "price_version": 1, "prices": rows}
    return json.dumps({**document, "tenants": names})


class World:
    """The door of one gateway on a loopback port, its worker, and looks into Redis."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url
        self.redis_keys = keys
        self.redis = redis.Redis.from_url(url)
        self.redis.set(keys.gate_built, 1)
        self.shelf = KeyShelf()
        self.keys = {tenant: self.shelf.issue(tenant) for tenant in (AURORA, BULK, NOVA, STRANGER)}
        self.worker = FakeWorker(url, keys)
        self.policy_version = 0
        self.base_url = ""
        self.runtime: Runtime | None = None
        self.build_gate: Callable[[], bool] = lambda: False  # there is no PostgreSQL, so no books to build it from
        self._clients: dict[tuple[str, bool], AsyncOpenAI] = {}

    def publish(self, *quotas: TenantClassPolicy) -> None:
        """Put these cells in force, the world's other cells beside them."""
        replaced = {(quota.tenant_id, quota.priority_class) for quota in quotas}
        others = [q for q in WORLD_QUOTAS if (q.tenant_id, q.priority_class) not in replaced]
        self.policy_version += 1
        document = policy_document(self.policy_version, [*others, *quotas])
        write_policy(self.redis, self.redis_keys, version=self.policy_version, document=document)

    async def set_quota(self, *quotas: TenantClassPolicy) -> None:
        """Publish, and wait until the gateway has it."""
        assert self.runtime is not None
        self.publish(*quotas)
        policy = self.runtime.policy
        await self.until(lambda: policy.view is not None and policy.view.version == self.policy_version)

    @staticmethod
    async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Poll for something that another thread or process brings about."""
        async with asyncio.timeout(timeout_s):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)

    def new_runtime(self, gateway_id: str, bus_type: type[RedisGatewayBus] = RedisGatewayBus) -> Runtime:
        return Runtime(
            bus=bus_type(self.url, gateway_id, keys=self.redis_keys),
            redis=connect_async(self.url),
            redis_keys=self.redis_keys,
            key_table=self.shelf,
            texts=[byte_text()],
            body_limit_bytes=BODY_LIMIT,
            build_gate=lambda: self.build_gate(),
        )

    def client(self, tenant: str = AURORA, *, strict: bool = True) -> AsyncOpenAI:
        """The official client, which checks our bodies against its own types."""
        found = self._clients.get((tenant, strict))
        if found is None:
            found = self._clients[tenant, strict] = AsyncOpenAI(
                base_url=f"{self.base_url}/v1",
                api_key=self.keys[tenant],
                max_retries=0,
                _strict_response_validation=strict,
            )
        return found

    async def close_clients(self) -> None:
        for client in self._clients.values():
            await client.close()

    def usage_messages(self) -> list[Any]:
        """All that stands in the durable stream, in order."""
        with contextlib.closing(RedisUsageReader(self.url, keys=self.redis_keys, consumer="test")) as reader:
            return [entry.message for entry in reader.read(10_000, 0.0)]

    def slots_in_use(self, tenant: str = AURORA, label: str = "default") -> int:
        return self.redis.zcard(f"{self.redis_keys.prefix}lease:{tenant}:{label}")

    def money(self, tenant: str, label: str) -> dict[str, int]:
        """open and settled, over all windows."""
        totals = {"open": 0, "settled": 0}
        for key in self.redis.scan_iter(f"{self.redis_keys.prefix}money:{tenant}:{label}:*"):
            for name, amount in zip(totals, self.redis.hmget(key, *totals), strict=True):
                totals[name] += int(amount or 0)
        return totals

    def level(self, kind: str, tenant: str, label: str = "default") -> float | None:
        level = self.redis.hget(f"{self.redis_keys.prefix}limit:{tenant}:{label}:{kind}", "level")
        return None if level is None else float(level)


@contextlib.asynccontextmanager
async def serving(application: Any) -> AsyncIterator[str]:
    """A server on a free loopback port, in this event loop: uvicorn's protocol, and nothing that ticks."""
    config = uvicorn.Config(application, lifespan="off", log_config=None, access_log=False)
    config.load()
    state = uvicorn.server.ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await World.until(lambda: not (state.connections or state.tasks), 1.0)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()


@pytest.fixture
async def world(valkey: str) -> AsyncIterator[World]:
    """One gateway behind a port, and a scripted worker."""
    from gateway import asgi

    world = World(valkey, Keys(f"test:{uuid.uuid4().hex}:"))
    world.publish()
    world.worker.start()
    runtime = world.runtime = world.new_runtime("gateway-1")
    await runtime.start()
    gateway_runtime.set_current(runtime)
    try:
        async with serving(asgi.router) as world.base_url:
            yield world
            await world.close_clients()
    finally:
        gateway_runtime.set_current(None)
        await runtime.stop()
        world.worker.stop()
        world.redis.close()
