"""Idempotency-Key: one generation and one charge, however often the same request is sent (P36)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from wire.messages import Reserved

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


async def send(world: Any, key: str, tenant: str = "aurora", path: str = CHAT, **changes: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {world.keys[tenant]}", "idempotency-key": key}
    body = {"model": "simulated", "messages": HI, **changes}
    body = {name: value for name, value in body.items() if value is not None}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        return await client.post(path, json=body)


def num_reserved(world: Any) -> int:
    return sum(isinstance(message, Reserved) for message in world.usage_messages())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_sent_again_is_answered_from_the_first(world: Any, stream: bool) -> None:
    """P36, third attempt: the stored answer with ``Idempotent-Replayed: true``; the same id, for streams too."""
    first = await send(world, "k1", stream=stream)
    again = await send(world, "k1", stream=stream)
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.text == first.text
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert (len(world.worker.submits), num_reserved(world)) == (1, 1)


async def test_another_body_under_the_same_key_is_422(world: Any) -> None:
    """P36, fourth attempt."""
    await send(world, "k1")
    other = await send(world, "k1", max_tokens=5)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    elsewhere = await send(world, "k1", path="/v1/completions", messages=None, prompt="x")
    assert elsewhere.status_code == 422
    assert len(world.worker.submits) == 1


async def test_a_running_twin_is_409_with_a_moment_to_come_back_and_then_answers(world: Any) -> None:
    """P36, second attempt."""
    world.worker.script.prompt_first = True
    first = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: len(world.worker.submits) == 1)
    twin = await send(world, "k1")
    assert (twin.status_code, twin.json()["error"]["code"]) == (409, "idempotency_twin_running")
    assert int(twin.headers["retry-after"]) >= 1
    world.worker.go_on()
    assert (await first).status_code == 200
    assert (await send(world, "k1")).json() == (await first).json()
    assert num_reserved(world) == 1


async def test_an_answer_whose_client_left_is_there_when_it_comes_again(world: Any) -> None:
    """P36: the answer was lost, not the work."""
    world.worker.script.prompt_first = True
    sending = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: bool(world.worker.submits))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    world.worker.go_on()
    answers: list[int] = []
    while not answers or answers[-1] == 409:
        again = await send(world, "k1")
        answers.append(again.status_code)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["choices"][0]["message"]["content"] == "Hello, Aurora."
    assert (len(world.worker.submits), world.worker.cancels, num_reserved(world)) == (1, [], 1)


async def test_a_key_belongs_to_its_tenant(world: Any) -> None:
    ours = await send(world, "k1")
    theirs = await send(world, "k1", tenant="bulk")
    assert theirs.status_code == 200
    assert theirs.json()["id"] != ours.json()["id"]


async def test_a_refused_request_does_not_occupy_its_key(world: Any) -> None:
    refused = await send(world, "k1", max_tokens=10**9)
    assert refused.status_code == 400
    world.worker.script.reject = ("late", 1_000_000)
    assert (await send(world, "k1", stream=True)).status_code == 503
    world.worker.script.reject = None
    assert (await send(world, "k1")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {}), ("/v1/responses", {"messages": None, "input": "Hi"})], ids=["chat", "responses"]
)
async def test_an_answer_that_failed_is_worked_on_anew_whatever_its_status_was(
    world: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    world.worker.script.reason = "failed"
    broken = await send(world, "k1", path=path, stream=stream, **body)
    assert "failed" in broken.text
    world.worker.script.reason = "stop"
    again = await send(world, "k1", path=path, stream=stream, **body)
    assert (again.status_code, "failed" in again.text) == (200, False)
    assert "idempotent-replayed" not in again.headers
    assert (await send(world, "k1", path=path, stream=stream, **body)).headers["idempotent-replayed"] == "true"


@pytest.mark.parametrize("key", ["k" * 256, "a\tb", ""])
async def test_a_key_that_is_none_is_400(world: Any, key: str) -> None:
    refused = await send(world, key)
    assert (refused.status_code, json.loads(refused.text)["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("second", ["k1", "k2", ""])
async def test_two_keys_are_400_also_where_both_are_the_same(world: Any, second: str) -> None:
    own = [("authorization", f"Bearer {world.keys['aurora']}"), ("content-type", "application/json")]
    keys = [("idempotency-key", "k1"), ("Idempotency-Key", second)]
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        refused = await client.post("/v1/chat/completions", content=b"{}", headers=[*own, *keys])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert num_reserved(world) == 0
