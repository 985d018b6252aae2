"""What a chat takes of its tenant's limits, and what refuses it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from scheduler_engine.policy import PriorityClass
from tests.gateway.chat_client import HI, MODEL, ask, cell
from wire.messages import Reserved, Usage


async def test_remaining_tokens_fall_by_the_worst_case_and_come_back_to_what_was_used(world: Any) -> None:
    client = world.client("nova")
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=100)
    used = raw.parse().usage.total_tokens
    assert raw.headers["x-ratelimit-limit-requests"] == "60"
    assert raw.headers["x-ratelimit-remaining-requests"] == "59"
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 6_000 - (used - 14) - 100
    assert raw.headers["x-ratelimit-class"] == "default"
    assert raw.headers["x-request-id"].startswith("req_")
    await world.until(lambda: world.level("tokens", "nova") == 6_000 - used)


async def test_money_and_slots_are_settled_by_the_workers_count(world: Any) -> None:
    completion = await ask(world, max_tokens=100)
    expected = completion.usage.prompt_tokens * 1 + completion.usage.completion_tokens * 2
    assert world.money("aurora", "default") == {"open": 0, "settled": expected}
    assert world.slots_in_use() == 0
    kinds = [type(message) for message in world.usage_messages()]
    assert kinds == [Reserved, Usage]


async def test_the_tenants_own_limit_is_429_with_a_moment_to_come_back(world: Any) -> None:
    await world.set_quota(cell("nova", requests_per_minute=1))
    await ask(world, "nova")
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(world, "nova")
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("never_fits", 400, "context_length_exceeded"),
        ("late", 503, "deadline_unreachable"),
        ("queue_wait", 503, "queue_timeout"),
        ("class_closed", 503, "overloaded"),
    ],
)
async def test_a_reject_before_the_first_token_is_a_status_streamed_or_not_and_free(
    world: Any, reason: str, status: int, code: str, stream: bool
) -> None:  # P23
    world.worker.script.reject = (reason, 2_000_000)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("retry-after") == ("2" if status == 503 else None)
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_a_closed_class_is_refused_at_the_door_and_the_batch_class_with_429(world: Any) -> None:  # P38
    world.worker.closed = {PriorityClass.BATCH: 7_000_000}
    await world.until(lambda: world.runtime.loads and world.runtime.loads[0].classes[2].closed)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(world, "bulk", service_tier="flex")
    assert caught.value.code == "resource_unavailable"
    assert caught.value.response.headers["retry-after"] == "7"
    assert world.worker.submits == []
    await ask(world, "bulk")


async def test_a_key_that_is_revoked_is_refused_as_soon_as_that_was_told(world: Any) -> None:
    await ask(world)
    public_id = world.keys["aurora"].split("_")[2]
    del world.shelf.stored[public_id]
    await ask(world)  # known for up to 30 s, unless told
    world.redis.publish(f"{world.redis_keys.prefix}keys:changed", public_id)

    async def refused() -> None:
        while True:
            try:
                await world.client().models.list()
            except openai.AuthenticationError:
                return

    await asyncio.wait_for(refused(), 5.0)


async def test_a_class_that_is_taken_away_is_refused_at_the_next_request(world: Any) -> None:
    await ask(world, "bulk", service_tier="flex")
    await world.set_quota(cell("bulk", PriorityClass.BATCH, allowed=False))
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await ask(world, "bulk", service_tier="flex")
    assert caught.value.code == "service_tier_not_granted"
    assert caught.value.response.headers["x-should-retry"] == "false"
