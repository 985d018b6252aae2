"""Who is refused costs no query: here is no PostgreSQL, Django may not open one, and look-ups of keys are counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tenants import api_keys

TIMES = 10
BODY = {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


async def refused(world: Any, key: str, status: int, **changes: Any) -> int:
    """Look-ups while so many are refused, the first of each behind us."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:

        async def statuses(times: int) -> list[int]:
            body = {**BODY, **changes}
            return [(await client.post("/v1/chat/completions", json=body)).status_code for _ in range(times)]

        assert await statuses(1) == [status]
        before = world.shelf.num_lookups
        assert await statuses(TIMES) == [status] * TIMES
    found: int = world.shelf.num_lookups - before
    return found


def nova(**limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id="nova", priority_class=PriorityClass.DEFAULT, **limits)


@pytest.mark.parametrize(
    ("limits", "changes"),
    [
        ({"requests_per_minute": 0}, {}),
        ({"tokens_per_minute": 1}, {}),
        ({"concurrency": 0}, {}),
        ({"money_micros": 0}, {}),
        ({"max_tokens_cap": 1}, {}),
    ],
)
async def test_a_limit_refuses_without_a_query(world: Any, limits: dict[str, int], changes: dict[str, Any]) -> None:
    await world.set_quota(nova(**limits))
    status = 400 if "max_tokens_cap" in limits else 429
    assert await refused(world, world.keys["nova"], status, **changes) == 0


async def test_a_full_bucket_and_full_slots_refuse_without_a_query(world: Any) -> None:
    world.worker.script.hang = True
    await world.set_quota(nova(requests_per_minute=1))
    async with httpx2.AsyncClient(
        base_url=world.base_url, headers={"Authorization": f"Bearer {world.keys['nova']}"}
    ) as client:
        body = {**BODY, "background": True, "input": "Hi", "max_output_tokens": 5}
        del body["messages"], body["max_tokens"]
        assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert await refused(world, world.keys["nova"], 429) == 0
    await world.set_quota(nova(concurrency=1))
    assert await refused(world, world.keys["nova"], 429) == 0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"model": "none"}, 404),
        ({"service_tier": "flex"}, 403),
        ({"n": -1}, 400),
        ({"nonsense": 1}, 400),
        ({"max_tokens": 10**7}, 400),
    ],
)
async def test_what_is_asked_wrongly_is_refused_without_a_query(
    world: Any, changes: dict[str, Any], status: int
) -> None:
    assert await refused(world, world.keys["nova"], status, **changes) == 0


async def test_a_closed_class_refuses_without_a_query(world: Any) -> None:
    world.worker.closed = dict.fromkeys(PriorityClass, 2_000_000)
    await world.until(lambda: all(row.closed for load in world.runtime.loads for row in load.classes))
    assert await refused(world, world.keys["nova"], 503) == 0


def revoked(world: Any) -> str:
    key: str = world.keys["nova"]
    public_id = api_keys.parse(key).public_id
    world.shelf.stored[public_id] = replace(world.shelf.stored[public_id], is_usable=False)
    world.runtime.keys.forget(public_id)
    return key


def with_a_typo(world: Any) -> str:
    key: str = world.keys["nova"]
    return key[:-1] + ("0" if key[-1] != "0" else "1")


def of_another_secret(world: Any) -> str:
    """A well-formed key with a known public id."""
    key, other = world.keys["nova"], api_keys.make("test")
    world.shelf.stored[other.public_id] = world.shelf.stored[api_keys.parse(key).public_id]
    return other.text


@pytest.mark.parametrize("make", [revoked, with_a_typo, of_another_secret])
async def test_a_bad_key_refuses_without_a_query(world: Any, make: Callable[[Any], str]) -> None:
    assert await refused(world, make(world), 401) == 0


async def test_an_unknown_key_is_looked_up_at_most_once_a_second(world: Any) -> None:
    """So that one just made opens soon, and a flood of a wrong one is no flood of queries."""
    started = time.monotonic()
    num_lookups = await refused(world, api_keys.make("test").text, 401)
    assert num_lookups <= 1 + (time.monotonic() - started)
