"""One of the web processes of test_admission_processes: lets in and takes back when told, and says what came of it.

Run as ``python admitting_process.py URL PREFIX``. Reads an ``Order`` a line and, at its moment of the machine's
monotonic clock, does all of it at once: asks for so many responses of worst case 60, and releases those it names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from dataclasses import dataclass, field
from zoneinfo import ZoneInfo

from redis.asyncio import Redis

from billing.pricing import TokenPrices
from gateway.admission import Admission, Denied, Grant, Wish
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import Released
from wire.redis_bus import RedisGatewayBus
from wire.redis_keys import Keys

PRICES = TokenPrices(prompt=1_000_000, cached=1_000_000, output=1_000_000)  # one micro for each token


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``now_ms`` is the clock that limits are taken by; None is Redis' own. ``lower``: limits of where it overflows."""

    at_ns: int
    tenant: str
    number: int
    limits: dict[str, int]
    release: list[str] = field(default_factory=list)
    now_ms: int | None = None
    lower: dict[str, int] | None = None


def bundles(order: Order) -> list[list[Wish]]:
    """Of one response."""
    response_id = str(uuid.uuid4())
    own = wish(response_id, order.tenant, PriorityClass.DEFAULT, order.limits)
    if order.lower is None:
        return [[own]]
    return [[own], [wish(response_id, order.tenant, PriorityClass.BATCH, order.lower)]]


def wish(response_id: str, tenant: str, priority_class: PriorityClass, limits: dict[str, int]) -> Wish:
    quota = TenantClassPolicy(tenant_id=tenant, priority_class=priority_class, **limits)
    return Wish(
        response_id=response_id,
        gateway_id=f"gateway-{tenant}",
        worker_id="worker-1",
        tenant_id=tenant,
        project_id="p",
        key_id="k",
        priority_class=priority_class,
        model="m",
        source="rest",
        prompt_tokens=20,
        max_tokens=40,
        quota=quota,
        prices=PRICES,
        zone=ZoneInfo("UTC"),
        policy_version=1,
        price_version=1,
    )


def as_json(outcome: list[Grant] | Denied) -> dict[str, object]:
    if not isinstance(outcome, Denied):
        return {"admitted": outcome[0].response_id}
    return {"status": outcome.refusal.status, "code": outcome.refusal.row.code, "reason": outcome.refusal.reason.name}


def admission(client: Redis, keys: Keys, now_ms: int | None) -> Admission:
    return Admission(client, keys, None if now_ms is None else lambda: now_ms)


async def race(url: str, keys: Keys) -> None:
    """A connection for each of a barrier's requests is opened before the barrier."""
    clients: list[Redis] = []
    bus = RedisGatewayBus(url, f"gateway-{uuid.uuid4().hex}", keys=keys)
    await bus.open()
    for line in iter(sys.stdin.readline, ""):
        order = Order(**json.loads(line))
        while len(clients) < order.number:
            clients.append(Redis.from_url(url, protocol=2))
            await clients[-1].ping()
        asks = [admission(client, keys, order.now_ms).admit(*bundles(order)) for client in clients[: order.number]]
        releases = [
            bus.append_usage(Released(response_id=response_id, tenant_id=order.tenant, reason="test"))
            for response_id in order.release
        ]
        while time.monotonic_ns() < order.at_ns:
            pass  # a barrier: sleeping would wake each process at another moment
        outcomes = (await asyncio.gather(*asks, *releases))[: len(asks)]
        sys.stdout.write(json.dumps([as_json(outcome) for outcome in outcomes if outcome is not None]) + "\n")
        sys.stdout.flush()
    for client in clients:
        await client.aclose()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(race(sys.argv[1], Keys(sys.argv[2])))
