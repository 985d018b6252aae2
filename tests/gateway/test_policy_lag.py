"""A gateway and a worker follow the policy, a moment behind it: that alone sends nobody away for good."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import openai
import pytest

from gateway import policy_feed, runtime
from gateway.auth import Caller
from gateway.batches.asking_lines import ask_line
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tests.gateway.conftest import BULK, cell
from tests.gateway.fake_worker import MODEL

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 40}
SHUT = {
    "paused": {"allowed": False},
    "capped below what is asked": {"max_tokens_cap": 39},
    "no request a minute": {"requests_per_minute": 0},
    "fewer tokens a minute than it needs": {"tokens_per_minute": 40},
    "no request at once": {"concurrency": 0},
    "no money": {"money_micros": 0},
}


def batch_cell(**limits: Any) -> TenantClassPolicy:
    return cell(BULK, PriorityClass.BATCH, **limits)


async def as_a_request(world: Any) -> int:
    try:
        answer = await world.client(BULK).chat.completions.with_raw_response.create(**BODY, service_tier="flex")
    except openai.APIStatusError as error:
        return error.status_code
    return int(answer.status_code)


async def as_a_line(world: Any) -> int:
    caller = Caller("key-bulk", "public", BULK, "project-bulk", PriorityClass.BATCH)
    reply = await ask_line(
        world.runtime,
        endpoint="/v1/chat/completions",
        caller=caller,
        body=json.dumps(BODY).encode(),
        response_id=str(uuid4()),
    )
    return reply.status


WAYS = {"a request": as_a_request, "a batch line": as_a_line}


async def test_a_policy_that_was_saved_and_not_heard_is_told_by_the_gateway(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published failed, or was lost with Redis: PostgreSQL knows better."""
    monkeypatch.setattr(runtime.services, "publish_policy", lambda: world.publish(batch_cell(allowed=False)))
    assert await as_a_request(world) == 200
    world.shelf.newest = world.policy_version + 1
    await world.until(lambda: world.runtime.policy.view.version == world.shelf.newest)
    assert await as_a_request(world) == 403
    assert world.policy_version == world.shelf.newest  # told once


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shut", SHUT)
async def test_whom_the_policy_in_force_lets_in_is_not_refused_by_an_older_one(world: Any, shut: str, way: str) -> None:
    await world.set_quota(batch_cell(**SHUT[shut]))
    await world.runtime.policy.stop()
    assert 400 <= await WAYS[way](world) < 500
    world.publish(batch_cell())
    assert await WAYS[way](world) == 200


async def test_a_tenant_new_to_the_platform_is_not_told_that_its_model_does_not_exist(world: Any) -> None:
    await world.runtime.policy.stop()
    client = world.client("stranger")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(**BODY)
    world.publish(cell("stranger", PriorityClass.DEFAULT))
    assert (await client.chat.completions.create(**BODY)).choices


@pytest.mark.parametrize("way", WAYS)
async def test_while_nobody_can_say_what_is_in_force_no_refusal_is_final(world: Any, way: str) -> None:
    await world.set_quota(batch_cell(allowed=False))
    await world.runtime.policy.stop()
    version = world.redis_keys.policy_version
    world.redis.delete(version)
    world.redis.lpush(version, "no version")
    assert await WAYS[way](world) == 503


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_with_another_policy_than_the_door_lets_nobody_be_refused_for_good(world: Any, way: str) -> None:
    world.worker.script.reject = ("not_allowed", None)
    assert await WAYS[way](world) == 503
    assert world.money(BULK, "batch") == {"open": 0, "settled": 0}


@pytest.mark.parametrize("way", WAYS)
async def test_a_gateway_whose_feed_has_died_still_goes_by_the_policy_in_force(
    world: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody spends by an old cap, however it came that nobody renews the view."""
    await world.set_quota(batch_cell())
    await world.runtime.policy.stop()
    monkeypatch.setattr(policy_feed, "MAX_AGE_S", 0.0)
    assert await WAYS[way](world) == 200
    world.publish(batch_cell(money_micros=0))
    assert 400 <= await WAYS[way](world) < 500
    world.publish(batch_cell(concurrency=0))
    assert 400 <= await WAYS[way](world) < 500


@pytest.mark.parametrize("way", WAYS)
async def test_while_nobody_can_say_what_is_in_force_an_old_policy_lets_nobody_in(
    world: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.set_quota(batch_cell())
    await world.runtime.policy.stop()
    monkeypatch.setattr(policy_feed, "MAX_AGE_S", 0.0)
    version = world.redis_keys.policy_version
    world.redis.delete(version)
    world.redis.lpush(version, "no version")
    assert await WAYS[way](world) == 503
    assert world.money(BULK, "batch") == {"open": 0, "settled": 0}
