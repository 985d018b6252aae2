"""A gate on a real Valkey and a clock of its own, for the tests of admission."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from redis.asyncio import Redis

from billing.pricing import TokenPrices
from gateway.admission import Admission, Denied, Grant, Standing, Wish
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import Released
from wire.redis_bus import RedisGatewayBus
from wire.redis_keys import Keys

UTC = ZoneInfo("UTC")
PER_TOKEN = TokenPrices(prompt=1_000_000, cached=1_000_000, output=1_000_000)  # one micro for each token
START_MS = 1_800_000_000_000


class Gate:
    """An admission on a clock of its own, with looks at what it holds."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.keys = Keys(prefix)
        self.redis = Redis.from_url(url, protocol=2)
        self._clients = [self.redis]
        self.now_ms = START_MS
        self.admission = self.another()
        self._ids = itertools.count(1)

    def another(self) -> Admission:
        """The admission of another process: only Redis is shared."""
        self._clients.append(Redis.from_url(self.url, protocol=2))
        return Admission(self._clients[-1], self.keys, lambda: self.now_ms)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    def wish(self, prompt: int = 10, max_tokens: int = 10, **limits: Any) -> Wish:
        quota = TenantClassPolicy(tenant_id="nova", priority_class=PriorityClass.DEFAULT, **limits)
        return Wish(
            response_id=f"r{next(self._ids)}",
            gateway_id="g",
            worker_id="w",
            tenant_id="nova",
            project_id="p",
            key_id="k",
            priority_class=PriorityClass.DEFAULT,
            model="m",
            source="rest",
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            quota=quota,
            prices=PER_TOKEN,
            zone=UTC,
            policy_version=1,
            price_version=1,
        )

    async def admit(
        self, prompt: int = 10, max_tokens: int = 10, *, may_wait: bool = False, **limits: Any
    ) -> Grant | Denied:
        found = await self.admission.admit([replace(self.wish(prompt, max_tokens, **limits), may_wait=may_wait)])
        return found if isinstance(found, Denied) else found[0]

    async def renew(self, *grants: Grant, gateway_id: str = "g") -> list[Standing]:
        return await self.admission.renew(gateway_id, grants)

    async def end(self, grant: Grant) -> None:
        """The response was refused further on: everything goes back."""
        bus = RedisGatewayBus(self.url, "g", keys=self.keys)
        released = Released(response_id=grant.response_id, tenant_id="nova", reason="test")
        await bus.append_usage(released)
        await bus.close()

    async def everything(self) -> dict[bytes, object]:
        """All of this gate's keys with their values."""
        found: dict[bytes, object] = {}
        async for key in self.redis.scan_iter(f"{self.keys.prefix}*"):
            if key.decode() == self.keys.gate_built:
                continue
            kind = await self.redis.type(key)
            match kind:
                case b"hash":
                    held = await self.redis.hgetall(key)
                    held.pop(b"refused_ms", None)  # of a money window: noted, and nothing taken
                    if held:
                        found[key] = held
                case b"zset":
                    found[key] = await self.redis.zrange(key, 0, -1, withscores=True)
                case _:
                    found[key] = await self.redis.xlen(key)
        return found

    async def money(self) -> tuple[int, int]:
        """(open, settled)."""
        async for key in self.redis.scan_iter(f"{self.keys.prefix}money:*"):
            held = await self.redis.hgetall(key)
            return int(held.get(b"open", 0)), int(held.get(b"settled", 0))
        return 0, 0


@asynccontextmanager
async def opened(valkey_url: str) -> AsyncIterator[Gate]:
    """It leaves nothing behind."""
    gate = Gate(valkey_url, f"admission:{uuid.uuid4().hex}:")
    await gate.redis.set(gate.keys.gate_built, 1)
    yield gate
    async for key in gate.redis.scan_iter(f"{gate.keys.prefix}*"):
        await gate.redis.delete(key)
    await gate.close()


def granted(outcome: Grant | Denied) -> Grant:
    assert isinstance(outcome, Grant), outcome
    return outcome


def denied(outcome: Grant | Denied) -> Denied:
    assert isinstance(outcome, Denied), outcome
    return outcome
