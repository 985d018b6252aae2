"""The official client, strict about our bodies: sync and raw, and every documented error as its exception class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.v1 import ROUTES
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tenants import api_keys
from tests.gateway.batches import test_surface as surface

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def cell(tenant: str, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=tenant, priority_class=PriorityClass.DEFAULT, **limits)


async def in_thread(world: Any, ask: Callable[[OpenAI], Any], key: str | None = None) -> Any:
    """The synchronous client, while this event loop serves it."""
    url, key = f"{world.base_url}/v1", key or world.keys["aurora"]
    with OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True) as client:
        return await asyncio.to_thread(ask, client)


async def test_the_synchronous_client_reads_all_endpoints(world: Any) -> None:
    def ask(client: OpenAI) -> list[str]:
        chat = client.chat.completions.create(model=MODEL, messages=HI, n=2, logprobs=True)
        chunks = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        text = client.completions.create(model=MODEL, prompt="Once").choices[0].text
        response = client.responses.create(model=MODEL, input="Hi")
        events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
        with client.responses.stream(model=MODEL, input="Hi") as stream:
            helped = stream.get_final_response().output_text
        assert client.models.retrieve(MODEL).id == next(model.id for model in client.models.list())
        assert client.responses.retrieve(response.id).output_text == response.output_text
        assert [item.type for item in client.responses.input_items.list(response.id)] == ["message"]
        client.responses.delete(response.id)
        return [chat.choices[0].message.content or "", streamed, text, events[-1].response.output_text, helped]

    assert await in_thread(world, ask) == ["Hello, Aurora."] * 5


@pytest.mark.parametrize("raw", [False, True], ids=["parsed", "raw"])
@pytest.mark.parametrize("kind", [OpenAI, AsyncOpenAI])
async def test_every_route_that_answers_is_read_strictly(world: Any, kind: Any, raw: bool) -> None:
    """All the rest of the routes: tests/gateway/batches/test_surface.py, whose list is held to the router's."""
    world.worker.step_s, world.worker.script.answer = 0.01, b"x" * 400  # still under way when it is cancelled
    client = surface.whole(world.base_url, world.keys["aurora"], kind)
    await surface.walk(surface.ANSWERS, client, raw=raw)


async def test_the_synchronous_client_resumes_a_stream_and_reads_one_raw(world: Any) -> None:
    def ask(client: OpenAI) -> list[Any]:
        made = client.responses.create(model=MODEL, input="Hi", background=True)
        whole = list(client.responses.retrieve(made.id, stream=True))
        rest = list(client.responses.retrieve(made.id, stream=True, starting_after=5))
        with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HI, stream=True) as raw:
            last = list(raw.iter_lines())[-2]
        return [whole[6:] == rest, whole[-1].type, last]

    assert await in_thread(world, ask) == [True, "response.completed", "data: [DONE]"]


async def test_a_raw_answer_has_the_headers_of_the_protocol_and_exact_limits(world: Any) -> None:
    await world.set_quota(cell("aurora", requests_per_minute=60, tokens_per_minute=6_000))

    def ask(client: OpenAI) -> list[Any]:
        return [
            client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=100, n=2),
            client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=100, stream=True),
        ]

    whole, streamed = await in_thread(world, ask)
    prompt = len(world.worker.submits[0].prompt_token_ids)
    assert whole.headers["x-ratelimit-remaining-requests"] == "59"
    assert int(whole.headers["x-ratelimit-remaining-tokens"]) == 6_000 - prompt - 2 * 100
    assert whole.headers["x-ratelimit-reset-requests"] == "1s"
    assert whole.headers["x-ratelimit-class"] == "default"
    for answer in (whole, streamed):
        assert answer.request_id.startswith("req_")
        assert answer.headers["openai-version"] == "2020-10-01"
        assert int(answer.headers["openai-processing-ms"]) >= 0
    assert streamed.headers["x-accel-buffering"] == "no"
    assert int(streamed.headers["x-ratelimit-remaining-requests"]) in (58, 59)


async def chat(world: Any, tenant: str = "aurora", **changes: Any) -> Any:
    return await world.client(tenant).chat.completions.create(**{"model": MODEL, "messages": HI, **changes})


@pytest.mark.parametrize(
    ("reject", "changes", "tenant", "expected", "code"),
    [
        (None, {"max_tokens": 0}, "aurora", openai.BadRequestError, "invalid_value"),
        (None, {"tools": [{"type": "function"}]}, "aurora", openai.BadRequestError, "unsupported_parameter"),
        (None, {"extra_body": {"colour": 1}}, "aurora", openai.BadRequestError, "unknown_parameter"),
        (None, {"max_tokens": 10**6}, "aurora", openai.BadRequestError, "context_length_exceeded"),
        (None, {"model": "gpt-9"}, "aurora", openai.NotFoundError, "model_not_found"),
        (None, {}, "stranger", openai.NotFoundError, "model_not_found"),
        (None, {"service_tier": "priority"}, "bulk", openai.PermissionDeniedError, "service_tier_not_granted"),
        (None, {"max_tokens": 5_999}, "nova", openai.RateLimitError, "rate_limit_exceeded"),
        (("never_fits", None), {}, "aurora", openai.BadRequestError, "context_length_exceeded"),
        (("grammar", None), {}, "aurora", openai.BadRequestError, None),
        (("late", 1), {}, "aurora", openai.InternalServerError, "deadline_unreachable"),
        (("queue_wait", 1), {}, "aurora", openai.InternalServerError, "queue_timeout"),
        (("class_closed", 1), {}, "aurora", openai.InternalServerError, "overloaded"),
        (("class_closed", 1), {"service_tier": "flex"}, "bulk", openai.RateLimitError, "resource_unavailable"),
    ],
)
async def test_a_documented_error_is_its_exception_class_with_its_code(
    world: Any, reject: Any, changes: dict[str, Any], tenant: str, expected: type[openai.APIStatusError], code: str
) -> None:
    world.worker.script.reject = reject
    with pytest.raises(expected) as caught:
        await chat(world, tenant, **changes)
    assert code is None or caught.value.code == code
    assert caught.value.request_id is not None
    assert set(caught.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]


async def test_a_wrong_key_is_an_authentication_error(world: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await in_thread(world, lambda client: client.models.list(), api_keys.make("test").text)
    assert caught.value.code == "invalid_api_key"


async def test_spent_money_is_a_rate_limit_error_that_is_not_tried_again(world: Any) -> None:
    await world.set_quota(cell("aurora", money_micros=1))
    with pytest.raises(openai.RateLimitError) as caught:
        await chat(world)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in caught.value.response.headers


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0, "top_p": 0.5, "seed": 3, "presence_penalty": 1, "frequency_penalty": -1},
        {"stop": ["a", "b"], "logit_bias": {"65": 5}, "user": "u", "metadata": {"a": "b"}},
        {"max_completion_tokens": 5, "max_tokens": 5, "n": 1, "parallel_tool_calls": True, "tool_choice": "none"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "reasoning_effort": "none"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto"},
        {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True}},
        {"extra_body": {"deadline_ms": 9_000, "completion_deadline_ms": 90_000, "max_queue_wait_ms": 9_000}},
    ],
)
async def test_every_documented_parameter_is_taken(world: Any, changes: dict[str, Any]) -> None:
    completion = await chat(world, **changes)
    assert completion.service_tier == "default"


async def test_every_plain_answer_says_how_long_it_waited(world: Any) -> None:
    client = world.client()
    answers = [
        await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI),
        await client.completions.with_raw_response.create(model=MODEL, prompt="Hi"),
        await client.responses.with_raw_response.create(model=MODEL, input="Hi"),
    ]
    assert [answer.headers["x-queue-ms"] for answer in answers] == ["2", "2", "2"]


async def through(world: Any, door: str, tenant: str = "aurora") -> int:
    """One request through one door; the tokens it used. Raises openai.APIStatusError."""
    client = world.client(tenant, strict=door != "completions, streamed")
    stream = door.endswith("streamed")
    if door.startswith("chat"):
        made = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        )
        return [chunk async for chunk in made][-1].usage.total_tokens if stream else made.usage.total_tokens
    if door.startswith("completions"):
        made = await client.completions.create(
            model=MODEL, prompt="x", stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        )
        return [chunk async for chunk in made][-1].usage.total_tokens if stream else made.usage.total_tokens
    made = await client.responses.create(model=MODEL, input="Hi", stream=stream)
    return [event async for event in made][-1].response.usage.total_tokens if stream else made.usage.total_tokens


DOORS = [f"{name}{how}" for name in ("chat", "completions", "responses") for how in ("", ", streamed")]


@pytest.mark.parametrize("door", DOORS)
async def test_the_bucket_falls_by_the_tokens_used_whichever_door_and_streamed_or_not(world: Any, door: str) -> None:
    """P11. (The websocket and batch lines pass the same admission.)"""
    used = await through(world, door, "nova")
    await world.until(lambda: world.level("tokens", "nova") == 6_000 - used)


@pytest.mark.parametrize("door", DOORS)
async def test_every_door_asks_for_money(world: Any, door: str) -> None:
    """P04."""
    await world.set_quota(cell("aurora", money_micros=1))
    with pytest.raises(openai.RateLimitError) as caught:
        await through(world, door)
    assert caught.value.code == "insufficient_quota"
    assert world.usage_messages() == []


def test_no_route_that_makes_something_goes_past_the_doors_above() -> None:
    """P04: a new endpoint that reaches an engine belongs into DOORS. A batch's lines ask at the same door later."""
    making = {route.pattern for route in ROUTES if route.method == "POST" and not route.pattern.endswith("/cancel")}
    assert making - {"/v1/files", "/v1/batches"} == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
