"""P37, P39. What its own class would refuse the policy may have served in a lower one: said, counted and charged so."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway import metrics
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import Reserved, Usage

INTERACTIVE, DEFAULT, BATCH = PriorityClass
BODY: dict[str, Any] = {
    "model": "simulated",
    "messages": [{"role": "user", "content": "Hi"}],
    "service_tier": "priority",
    "max_tokens": 5,
}


def cell(priority_class: PriorityClass, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id="aurora", priority_class=priority_class, **limits)


def overflowing(**limits: Any) -> TenantClassPolicy:
    return cell(INTERACTIVE, overflow_to=DEFAULT, **limits)


async def ask(world: Any, **changes: Any) -> Any:
    return await world.client().chat.completions.with_raw_response.create(**{**BODY, **changes})


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": 1},
        {"concurrency": 0},
        {"money_micros": 0},
    ],
)
async def test_beyond_its_limits_a_class_overflows_into_the_next_and_takes_nothing_of_its_own(
    world: Any, limits: dict[str, Any]
) -> None:
    await world.set_quota(overflowing(**limits))
    before = metrics.counters.downgrades["interactive", "default"]
    raw = await ask(world)
    answer = raw.parse()
    assert answer.service_tier == "default"
    assert raw.headers["x-ratelimit-class"] == "default"
    (submit,) = world.worker.submits
    reserved, used = world.usage_messages()
    assert isinstance(reserved, Reserved)
    assert isinstance(used, Usage)
    assert {(one.priority_class, one.requested_class) for one in (submit, reserved, used)} == {(DEFAULT, INTERACTIVE)}
    assert world.money("aurora", "interactive") == {"open": 0, "settled": 0}
    usage = answer.usage
    assert world.money("aurora", "default") == {
        "open": 0,
        "settled": usage.prompt_tokens + 2 * usage.completion_tokens,
    }
    assert metrics.counters.downgrades["interactive", "default"] == before + 1


async def test_a_class_that_is_not_granted_or_paused_sends_nobody_down(world: Any) -> None:
    await world.set_quota(overflowing(allowed=False))
    with pytest.raises(openai.PermissionDeniedError):
        await ask(world)


async def test_only_what_does_not_fit_any_more_overflows(world: Any) -> None:
    await world.set_quota(overflowing(requests_per_minute=1))
    answers = [(await ask(world)).parse() for _ in range(3)]
    assert [answer.service_tier for answer in answers] == ["priority", "default", "default"]
    reserved = [one for one in world.usage_messages() if isinstance(one, Reserved)]
    assert [one.requested_class for one in reserved] == [None, INTERACTIVE, INTERACTIVE]


async def test_streams_and_responses_say_the_served_tier_too(world: Any) -> None:
    await world.set_quota(overflowing(requests_per_minute=0))
    stream = await world.client().chat.completions.create(**BODY, stream=True)
    assert {chunk.service_tier async for chunk in stream} == {"default"}
    wanted = {"model": "simulated", "input": "Hi", "service_tier": "priority", "max_output_tokens": 5}
    assert (await world.client().responses.create(**wanted)).service_tier == "default"


async def test_a_list_of_prompts_says_the_lowest_tier_that_served_one_of_them(world: Any) -> None:
    await world.set_quota(overflowing(requests_per_minute=1))
    answer = await world.client().completions.create(
        model="simulated", prompt=["a", "b"], max_tokens=5, extra_body={"service_tier": "priority"}
    )
    assert answer.service_tier == "default"


async def test_where_the_lower_class_is_full_too_the_refusal_is_that_of_the_class_asked_for(world: Any) -> None:
    await world.set_quota(overflowing(money_micros=1), cell(DEFAULT, money_micros=1))
    with pytest.raises(openai.RateLimitError, match="class interactive") as refusal:
        await ask(world)
    assert refusal.value.code == "insufficient_quota"
    assert world.usage_messages() == []


async def test_overflow_goes_one_class_down_and_no_further(world: Any) -> None:
    await world.set_quota(
        overflowing(money_micros=1), cell(DEFAULT, money_micros=1, overflow_to=BATCH), cell(BATCH, money_micros=10**9)
    )
    with pytest.raises(openai.RateLimitError):
        await ask(world)


async def test_a_lower_class_that_cannot_serve_this_ask_is_no_way_out(world: Any) -> None:
    await world.set_quota(overflowing(money_micros=0), cell(DEFAULT, max_tokens_cap=4, default_max_tokens=4))
    with pytest.raises(openai.RateLimitError):
        await ask(world)
    assert (await ask(world, max_tokens=4)).parse().service_tier == "default"


async def test_the_platforms_own_want_of_room_sends_nobody_down(world: Any) -> None:
    await world.set_quota(overflowing())
    world.worker.closed = {INTERACTIVE: 1_000_000}
    await world.until(lambda: any(row.closed for load in world.runtime.loads for row in load.classes))
    with pytest.raises(openai.InternalServerError) as refusal:
        await ask(world)
    assert refusal.value.code == "overloaded"


async def test_who_waits_for_a_slot_waits_in_the_class_asked_for(world: Any) -> None:
    await world.set_quota(overflowing(concurrency=1))
    world.worker.script.hang = True
    first = await world.client().responses.create(
        model="simulated", input="Hi", background=True, service_tier="priority"
    )
    assert first.service_tier == "priority"
    world.worker.script.hang = False
    waiting = await ask(world, extra_body={"max_queue_wait_ms": 60_000})
    assert waiting.parse().service_tier == "priority"
    assert (await ask(world)).parse().service_tier == "default"
