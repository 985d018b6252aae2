"""A list of prompts is let in as a whole or not at all, and then nothing was taken and nothing computed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway.admission import Denied
from gateway.errors import Reason
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tests.gateway.admission_world import Gate, opened
from wire.bus import BusFull
from wire.messages import Released, Reserved, Usage

DEFAULT, BATCH = PriorityClass.DEFAULT, PriorityClass.BATCH


@pytest.fixture
async def gate(valkey: str) -> Any:
    async with opened(valkey) as gate:
        yield gate


def cell(priority_class: PriorityClass = DEFAULT, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id="aurora", priority_class=priority_class, **limits)


async def ask(world: Any, prompt: Any, **changes: Any) -> Any:
    call = {"model": "simulated", "prompt": prompt, "max_tokens": 5, **changes}
    return await world.client().completions.with_raw_response.create(**call)


@pytest.mark.parametrize(
    ("limits", "held", "prompt", "said"),
    [
        ({"requests_per_minute": 4}, 2, ["a", "b", "c"], "requests per minute"),
        ({"tokens_per_minute": 20}, 2, ["a", "b", "c"], "tokens per minute"),
        ({"concurrency": 4}, 2, ["a", "b", "c"], "too few are free for the 3 prompts"),
        ({"money_micros": 30}, 0, ["a", "b", "c"], "its 3 prompts and 15 output tokens"),
        ({}, 0, ["a", "b", "c" * 100_000], "context"),
        ({}, 0, [[1], [2], [9_999]], "Token id 9999"),
    ],
    ids=["requests", "tokens", "at once", "money", "too long", "no such token"],
)
async def test_a_list_of_which_one_is_refused_takes_and_computes_nothing(
    world: Any, limits: dict[str, Any], held: int, prompt: Any, said: str
) -> None:
    """Whatever the limit: what stands before the refused prompt in the list leaves no trace."""
    await world.set_quota(cell(**limits))
    world.worker.script.hang = True
    first = [asyncio.create_task(ask(world, "x")) for _ in range(held)]
    await world.until(lambda: len(world.worker.submits) == held)
    before = standing(world)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world, prompt)
    assert said in caught.value.message
    assert standing(world)[:3] == before[:3]
    assert all(now >= then for now, then in zip(standing(world)[3], before[3], strict=True))  # they refill
    for task in first:
        task.cancel()


def standing(world: Any) -> tuple[Any, ...]:
    levels = [world.level(kind, "aurora") or 0.0 for kind in ("requests", "tokens")]
    return len(world.worker.submits), len(world.usage_messages()), world.money("aurora", "default"), levels


@pytest.mark.parametrize(
    ("limits", "changes"),
    [
        ({"concurrency": 3}, {}),
        ({"requests_per_minute": 3}, {}),
        ({"tokens_per_minute": 200}, {"max_tokens": 50}),
    ],
    ids=["at once", "requests", "tokens"],
)
async def test_a_list_that_can_never_fit_is_not_told_to_come_back(
    world: Any, limits: dict[str, Any], changes: dict[str, Any]
) -> None:
    await world.set_quota(cell(**limits))
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(world, ["a", "b", "c", "d"], **changes)
    headers = caught.value.response.headers
    assert (headers["x-should-retry"], "retry-after" in headers) == ("false", False)


async def test_a_list_overflows_as_a_whole(world: Any) -> None:
    """Its answer names one tier, which is the one that every prompt is charged at."""
    await world.set_quota(cell(requests_per_minute=2, overflow_to=BATCH), cell(BATCH))
    answer = (await ask(world, ["a", "b", "c"])).parse()
    assert answer.service_tier == "flex"
    served = [one.priority_class for one in world.usage_messages() if isinstance(one, Reserved | Usage)]
    assert served == [BATCH] * 6
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_a_list_that_no_worker_could_be_handed_is_computed_by_none(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = world.runtime.bus.send

    async def full(worker_id: str, *messages: Any) -> None:
        if any(getattr(one, "prompt_token_ids", None) == (98,) for one in messages):
            raise BusFull("at its hard length")
        await send(worker_id, *messages)

    monkeypatch.setattr(world.runtime.bus, "send", full)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world, ["a", "b", "c"])
    assert caught.value.status_code == 503
    await world.until(lambda: world.slots_in_use() == 0)
    await world.until(lambda: sum(isinstance(one, Released) for one in world.usage_messages()) == 3)
    assert world.worker.submits == []
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_together_responses_take_of_each_limit_what_they_take_one_by_one(gate: Gate, valkey: str) -> None:
    limits = {"concurrency": 9, "money_micros": 900, "tokens_per_minute": 900, "requests_per_minute": 9}
    wishes = [gate.wish(10 * n, 20, **limits) for n in range(1, 4)]
    async with opened(valkey) as other:
        for wish in wishes:
            assert not isinstance(await other.admission.admit([wish]), Denied)
        one_by_one = {
            key.decode().removeprefix(other.keys.prefix): held for key, held in (await other.everything()).items()
        }
    found = await gate.admission.admit(wishes)
    assert not isinstance(found, Denied)
    assert [grant.response_id for grant in found] == [wish.response_id for wish in wishes]
    together = {key.decode().removeprefix(gate.keys.prefix): held for key, held in (await gate.everything()).items()}
    assert without_prefixes(together) == without_prefixes(one_by_one)
    for grant in found:
        await gate.end(grant)
    assert await gate.money() == (0, 0)
    assert not await gate.redis.zcard(found[0].lease_key)


def without_prefixes(everything: dict[str, Any]) -> dict[str, Any]:
    """A record names the keys that it gives back to; each gate has keys of its own."""
    names = {b"lease_keys", b"token_refunds", b"request_refunds", b"money_keys"}
    return {
        key: {name: value for name, value in held.items() if name not in names} if isinstance(held, dict) else held
        for key, held in everything.items()
    }


@pytest.mark.parametrize("repetition", range(20))
async def test_of_lists_that_come_at_once_as_many_are_let_in_as_fit_whole(gate: Gate, repetition: int) -> None:
    doors = [gate.another() for _ in range(3)]
    lists = [[gate.wish(concurrency=8) for _ in range(3)] for _ in range(6)]
    outcomes = await asyncio.gather(*(doors[(n + repetition) % 3].admit(each) for n, each in enumerate(lists)))
    assert [len(found) for found in outcomes if not isinstance(found, Denied)] == [3, 3]
    assert {found.refusal.reason for found in outcomes if isinstance(found, Denied)} == {Reason.CONCURRENCY}


async def test_of_a_list_of_which_one_was_let_in_before_none_is_let_in_again(gate: Gate) -> None:
    known, new = gate.wish(), gate.wish()
    assert not isinstance(await gate.admission.admit([known]), Denied)
    before = await gate.everything()
    assert isinstance(await gate.admission.admit([new, known]), Denied)
    assert await gate.everything() == before


async def test_of_a_list_that_may_wait_more_than_the_limit_are_let_in(gate: Gate) -> None:
    """The engine runs no more of them at once than the limit says."""
    wishes = [replace(gate.wish(concurrency=2), may_wait=True) for _ in range(3)]
    assert not isinstance(await gate.admission.admit(wishes), Denied)
