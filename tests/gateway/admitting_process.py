"""One of the web processes of test_admission_processes: admits when told, and says what came of it.

Run as ``python admitting_process.py URL PREFIX``. Reads lines ``{"at_ns": …, "tenant": …, "number": …}`` and, at that
moment of the machine's monotonic clock, asks for that many responses of worst case 60 at once under a cap of 100.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from zoneinfo import ZoneInfo

from redis.asyncio import Redis

from billing.pricing import TokenPrices
from gateway.admission import Admission, Denied, Grant, Wish
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.redis_keys import Keys

CAP = 100
PRICES = TokenPrices(prompt=1_000_000, cached=1_000_000, output=1_000_000)  # one micro for each token


def wish(tenant_id: str) -> Wish:
    quota = TenantClassPolicy(tenant_id=tenant_id, priority_class=PriorityClass.DEFAULT, money_micros=CAP)
    return Wish(
        response_id=str(uuid.uuid4()),
        gateway_id=f"gateway-{tenant_id}",
        worker_id="worker-1",
        tenant_id=tenant_id,
        project_id="p",
        key_id="k",
        priority_class=PriorityClass.DEFAULT,
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


def as_json(outcome: Grant | Denied) -> dict[str, object]:
    if isinstance(outcome, Grant):
        return {"admitted": outcome.response_id}
    return {"status": outcome.refusal.status, "code": outcome.refusal.row.code}


async def race(url: str, keys: Keys) -> None:
    """A connection for each of a barrier's requests is opened before the barrier."""
    clients: list[Redis] = []
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        while len(clients) < order["number"]:
            clients.append(Redis.from_url(url, protocol=2))
            await clients[-1].ping()
        asks = [Admission(client, keys).admit(wish(order["tenant"])) for client in clients]
        while time.monotonic_ns() < order["at_ns"]:
            pass  # a barrier: sleeping would wake each process at another moment
        outcomes = await asyncio.gather(*asks)
        sys.stdout.write(json.dumps([as_json(outcome) for outcome in outcomes]) + "\n")
        sys.stdout.flush()
    for client in clients:
        await client.aclose()


asyncio.run(race(sys.argv[1], Keys(sys.argv[2])))
