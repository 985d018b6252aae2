"""/v1/responses over HTTP through the official client: create, stream, background, retrieve, resume, cancel, delete."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx2
import openai
import pytest

from wire.messages import Reserved, Usage

MODEL = "simulated"


async def create(world: Any, tenant: str = "aurora", **changes: Any) -> Any:
    return await world.client(tenant).responses.create(**{"model": MODEL, "input": "Hi", **changes})


async def in_background(world: Any, **changes: Any) -> Any:
    return await create(world, background=True, max_output_tokens=500, **changes)


def slowly(world: Any, num_tokens: int = 150) -> None:
    world.worker.script.answer = bytes(97 + i % 26 for i in range(num_tokens))
    world.worker.step_s = 0.004


async def get(world: Any, path: str, tenant: str = "aurora", method: str = "GET") -> httpx2.Response:
    headers = {"authorization": f"Bearer {world.keys[tenant]}"}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        return await client.request(method, f"/v1/responses/{path}")


async def test_a_response_is_answered_whole(world: Any) -> None:
    response = await create(world, instructions="Be kind.", max_output_tokens=50, service_tier="priority")
    assert (response.output_text, response.status) == ("Hello, Aurora.", "completed")
    assert (response.service_tier, response.max_output_tokens) == ("priority", 50)
    assert response.usage.output_tokens == 14
    assert response.usage.input_tokens == len(world.worker.submits[0].prompt_token_ids)


async def test_a_stream_has_the_events_of_the_websocket_with_the_same_numbers(world: Any) -> None:
    world.worker.script.answer = "aé".encode()
    events = [event async for event in await create(world, stream=True)]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta",) * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(11))
    assert events[-1].response.output_text == "aé"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reject_before_the_first_token_is_a_status(world: Any, stream: bool) -> None:
    world.worker.script.reject = ("queue_wait", 2_000_000)
    with pytest.raises(openai.InternalServerError) as caught:
        await create(world, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "queue_timeout")
    assert caught.value.response.headers["retry-after"] == "2"


async def test_a_failure_in_mid_stream_is_response_failed(world: Any) -> None:
    world.worker.script.reason = "failed"
    events = [event async for event in await create(world, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"


async def test_a_background_response_goes_on_by_itself_and_is_found_at_every_stage(world: Any) -> None:
    world.worker.script.prompt_first = True
    response = await in_background(world)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    client = world.client()
    assert (await client.responses.retrieve(response.id)).status == "queued"
    world.worker.go_on()
    found = await client.responses.retrieve(response.id)
    while found.status in ("queued", "in_progress"):
        found = await client.responses.retrieve(response.id)
    assert (found.status, found.output_text, found.id) == ("completed", "Hello, Aurora.", response.id)
    assert found.usage.output_tokens == 14
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]
    assert len(world.runtime.streams) == 0


@pytest.mark.parametrize("starting_after", [-1, 0, 3, 4, 40])
async def test_a_stream_resumes_behind_any_event_while_it_runs_and_after_it_ended(
    world: Any, starting_after: int
) -> None:
    """P67, the half that belongs here: all events once, whenever the client comes back."""
    slowly(world, 60)
    response = await in_background(world)
    client = world.client()
    whole = [e async for e in await client.responses.retrieve(response.id, stream=True)]
    assert [event.sequence_number for event in whole] == list(range(68))
    again = await client.responses.retrieve(response.id, stream=True, starting_after=starting_after)
    rest = [event async for event in again]
    assert [e.to_dict() for e in rest] == [e.to_dict() for e in whole[starting_after + 1 :]]


async def test_a_client_that_lost_its_stream_goes_on_where_it_was(world: Any) -> None:
    """T7. No gap and no repeat, and the generation was never bound to the connection."""
    slowly(world)
    stream = await in_background(world, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 40:
            break
    await stream.close()
    name = seen[0].response.id
    rest = await world.client().responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == list(range(158))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text.encode() == world.worker.script.answer
    assert world.worker.cancels == []


async def test_two_may_read_the_same_response_at_once(world: Any) -> None:
    slowly(world, 100)
    response = await in_background(world)

    async def read() -> list[int]:
        stream = await world.client().responses.retrieve(response.id, stream=True)
        return [event.sequence_number async for event in stream]

    assert await asyncio.gather(read(), read()) == [list(range(108))] * 2


async def test_a_stream_that_is_not_in_the_background_ends_with_its_client(world: Any) -> None:
    slowly(world)
    stream = await create(world, stream=True, max_output_tokens=500)
    await anext(aiter(stream))
    await stream.close()
    await world.until(lambda: len(world.worker.cancels) == 1)
    await world.until(lambda: world.slots_in_use() == 0)


async def test_a_cancelled_response_says_so_and_keeps_what_was_made(world: Any) -> None:
    slowly(world)
    response = await in_background(world)
    client = world.client()
    found = await client.responses.retrieve(response.id)
    while not found.output:
        found = await client.responses.retrieve(response.id)
    cancelled = await client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert 0 < len(cancelled.output_text) < 150
    assert (await client.responses.cancel(response.id)).output_text == cancelled.output_text
    (usage,) = [message for message in world.usage_messages() if isinstance(message, Usage)]
    assert (usage.terminal, usage.output_tokens) == ("cancelled_client", len(cancelled.output_text))


async def test_what_has_ended_cannot_be_cancelled(world: Any) -> None:
    response = await create(world)
    with pytest.raises(openai.ConflictError) as caught:
        await world.client().responses.cancel(response.id)
    assert caught.value.code == "response_not_cancellable"
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_a_deleted_response_is_gone_and_stops(world: Any) -> None:
    slowly(world)
    response = await in_background(world)
    client = world.client()
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    await world.until(lambda: len(world.worker.cancels) == 1)
    await world.until(lambda: world.slots_in_use() == 0)


async def test_the_input_is_listed_in_pages(world: Any) -> None:
    items = [{"role": role, "content": role.upper()} for role in ("user", "assistant", "user", "developer")]
    response = await create(world, input=items)
    client = world.client()
    page = await client.responses.input_items.list(response.id, order="asc", limit=3)
    assert [item.role for item in page.data] == ["user", "assistant", "user"]
    assert page.has_more
    texts = [item.content[0].text async for item in client.responses.input_items.list(response.id, limit=1)]
    assert texts == ["DEVELOPER", "USER", "ASSISTANT", "USER"]


@pytest.mark.parametrize("what", ["", "/input_items", "/cancel"])
async def test_a_response_of_another_tenant_is_answered_like_one_that_never_was(world: Any, what: str) -> None:
    """P47."""
    theirs = (await create(world)).id
    method = "POST" if what == "/cancel" else "GET"
    names = (theirs, f"resp_{uuid.uuid4()}", "resp_nonsense", theirs.upper())
    answers = [await get(world, name + what, tenant="bulk", method=method) for name in names]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.text for answer in answers}) == 1
    assert (await get(world, theirs, tenant="bulk", method="DELETE")).status_code == 404
    assert (await get(world, theirs)).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=maybe", "stream"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=-2", "starting_after"),
        ("?starting_after=3", "starting_after"),
        ("?colour=blue", "colour"),
    ],
)
async def test_a_bad_query_is_named(world: Any, query: str, param: str) -> None:
    response = await get(world, (await create(world)).id + query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "invalid_value", "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "strict": True}}}, "invalid_value", "text.format.strict"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning"),
    ],
)
async def test_a_bad_field_is_named(world: Any, changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await create(world, **changes)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert world.usage_messages() == []


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


async def test_a_text_format_becomes_a_grammar_and_is_shown_again(world: Any) -> None:
    wanted = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    response = await create(world, text={"format": wanted})
    grammar = world.worker.submits[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", SCHEMA)
    assert response.text.format.type == "json_schema"
    assert response.text.format.name == "place"


@pytest.mark.parametrize("told_by", ["the gateway", "the worker"])
async def test_a_schema_that_cannot_be_followed_is_blamed_on_text_format(world: Any, told_by: str) -> None:
    schema = SCHEMA
    if told_by == "the gateway":
        schema = {"type": "object", "properties": {"city": {"type": "town"}}}
    else:
        world.worker.script.reject = ("grammar", None)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(world, text={"format": {"type": "json_schema", "name": "place", "schema": schema}})
    assert (caught.value.code, caught.value.param) == ("invalid_value", "text.format")
