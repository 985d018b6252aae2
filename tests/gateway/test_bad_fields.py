"""Every bad field gets the right status and the OpenAI error object with its name, and costs nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.bad_requests import assert_refused, body, send


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": ...}, "missing_required_parameter", "model"),
        ({"messages": ...}, "missing_required_parameter", "messages"),
        ({"model": 5}, "invalid_type", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hi"}, "invalid_type", "messages"),
        ({"messages": ["Hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "unknown_parameter", "messages[0].colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": 10**9}, "context_length_exceeded", "max_tokens"),
        ({"max_completion_tokens": 10**9}, "context_length_exceeded", "max_completion_tokens"),
        ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": "7"}, "invalid_type", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "invalid_value", "min_tokens"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_p": -0.1}, "invalid_value", "top_p"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"seed": 2**70}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
        ({"stop": "x" * 257}, "invalid_value", "stop"),
        ({"stop": ["a", "é" * 129]}, "invalid_value", "stop"),
        ({"stop": [1]}, "invalid_type", "stop[0]"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "invalid_type", "logit_bias"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 17}, "invalid_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"logprobs": 1}, "invalid_type", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 1}, "invalid_value", "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "colour": 1}}},
            "unknown_parameter",
            "response_format.json_schema.colour",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
            "invalid_value",
            "response_format.json_schema",
        ),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "unknown_parameter", "stream_options.colour"),
        ({"service_tier": "gold"}, "invalid_value", "service_tier"),
        ({"deadline_ms": 0}, "invalid_value", "deadline_ms"),
        ({"deadline_ms": -5}, "invalid_value", "deadline_ms"),
        ({"completion_deadline_ms": 0}, "invalid_value", "completion_deadline_ms"),
        ({"max_queue_wait_ms": 0}, "invalid_value", "max_queue_wait_ms"),
        ({"colour": "blue"}, "unknown_parameter", "colour"),
    ],
    ids=lambda value: json.dumps(value, default=lambda _: "absent")[:70] if isinstance(value, dict) else None,
)
async def test_a_bad_field_is_named(world: Any, changes: dict[str, Any], code: str, param: str) -> None:
    assert_refused(world, await send(world, body(**changes)), 400, code, param)


async def test_four_stop_strings_of_the_greatest_length_are_taken(world: Any) -> None:
    response = await send(world, body(stop=["é" * 128, "b" * 256, "c", "d"]))
    assert response.status_code == 200


@pytest.mark.parametrize("tier", ["gold", "x" * 10_000])
async def test_an_unknown_tier_is_told_the_ones_there_are(world: Any, tier: str) -> None:  # P39
    response = await send(world, body(service_tier=tier))
    assert_refused(world, response, 400, "invalid_value", "service_tier")
    message = response.json()["error"]["message"]
    assert message == "Invalid 'service_tier': Must be one of auto, default, flex, priority, fast."


async def test_a_value_in_an_object_that_is_wrong_is_told_with_the_field_and_the_bound(world: Any) -> None:
    response = await send(world, body(logit_bias={"5": 101}))
    assert response.json()["error"]["message"] == "Invalid 'logit_bias': a value in it: Expected `float` <= 100.0."


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_400(world: Any, stream: bool) -> None:
    world.worker.max_model_len = 64
    while world.runtime.loads[0].max_model_len != 64:
        world.runtime.loads = await world.runtime.bus.loads()
    content = body(messages=[{"role": "user", "content": "x" * 64}], stream=stream)
    assert_refused(world, await send(world, content), 400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("tier", ["priority", "fast"])
async def test_a_class_the_tenant_may_not_use_is_403_and_no_use_to_repeat(world: Any, tier: str) -> None:  # P39
    authorization = f"Bearer {world.keys['bulk']}"
    response = await send(world, body(service_tier=tier), authorization=authorization)
    assert_refused(world, response, 403, "service_tier_not_granted", "service_tier")
    assert response.headers["x-should-retry"] == "false"


async def test_what_its_limit_can_never_hold_is_429_and_no_use_to_repeat(world: Any) -> None:
    response = await send(world, body(max_tokens=6_000), authorization=f"Bearer {world.keys['nova']}")
    assert_refused(world, response, 429, "rate_limit_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    "changes",
    [
        {"c" * 5_000: 1},
        {"messages": [{"role": "w" * 5_000, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "c" * 5_000: 1}]},
        {"service_tier": "t" * 5_000},
    ],
    ids=["unknown field", "role", "unknown field of a message", "tier"],
)
async def test_what_a_caller_wrote_is_quoted_back_only_so_far(world: Any, changes: dict[str, Any]) -> None:
    response = await send(world, body(**changes))
    assert response.status_code == 400
    assert len(response.content) < 1_000
