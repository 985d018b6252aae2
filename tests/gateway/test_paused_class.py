"""A class that an operator paused: callers are told that, and not that their model does not exist."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from scheduler_engine.policy import PriorityClass
from tests.gateway.conftest import cell
from tests.gateway.fake_worker import MODEL

NOVA_PAUSED = cell("nova", PriorityClass.DEFAULT, allowed=False)  # its only class
WORDS = "Class default (service tier 'default') is paused or not granted to this tenant."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "service_tier": "default"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "background": True}),
    ],
)
async def test_a_request_in_a_paused_class_is_403_also_where_the_tenant_has_no_other(
    world: Any, path: str, body: dict[str, Any]
) -> None:
    await world.set_quota(NOVA_PAUSED)
    headers = {"authorization": f"Bearer {world.keys['nova']}", "content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        answer = await client.post(path, content=json.dumps({"model": MODEL, **body}), headers=headers)
    assert answer.status_code == 403
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["message"]) == ("service_tier_not_granted", "service_tier", WORDS)
    assert world.usage_messages() == []


async def test_a_model_whose_classes_are_all_paused_is_shown_without_a_tier(world: Any) -> None:
    await world.set_quota(NOVA_PAUSED)
    (listed,) = [model async for model in world.client("nova").models.list()]
    shown = await world.client("nova").models.retrieve(MODEL)
    assert (listed.id, listed.service_tiers) == (shown.id, shown.service_tiers) == (MODEL, [])


async def test_an_unknown_model_is_404_also_while_the_class_is_paused(world: Any) -> None:
    await world.set_quota(NOVA_PAUSED)
    with pytest.raises(openai.NotFoundError) as caught:
        await world.client("nova").completions.create(model="gpt-9", prompt="Hi")
    assert caught.value.code == "model_not_found"


async def test_a_class_that_is_resumed_lets_requests_in_again(world: Any) -> None:
    await world.set_quota(NOVA_PAUSED)
    await world.set_quota(cell("nova", PriorityClass.DEFAULT))
    assert (await world.client("nova").completions.create(model=MODEL, prompt="Hi")).choices
    assert (await world.client("nova").models.retrieve(MODEL)).service_tiers == ["default"]
