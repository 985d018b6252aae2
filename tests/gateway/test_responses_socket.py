"""The websocket /v1/responses through ``client.responses.connect()`` and by hand: events, lanes, cancel, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tests.gateway.socket_client import MODEL, create, read, read_one, socket
from wire.messages import Reserved, Usage


async def test_the_official_client_reads_a_whole_response(world: Any) -> None:
    async with world.client().responses.connect() as connection:
        await connection.response.create(model=MODEL, input="Hi", max_output_tokens=50, service_tier="priority")
        events = []
        async for event in connection:
            events.append(event)
            if event.type == "response.completed":
                break
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello, Aurora."
    response = events[-1].response
    assert (response.output_text, response.status, response.service_tier) == ("Hello, Aurora.", "completed", "priority")
    assert response.usage.output_tokens == 14
    assert response.usage.input_tokens == len(world.worker.submits[0].prompt_token_ids)
    assert response.max_output_tokens == 50


async def test_the_events_are_a_preamble_one_delta_per_token_and_a_tail_without_a_gap(world: Any) -> None:
    world.worker.script.answer = "aé".encode()
    async with socket(world) as connection:
        await create(connection)
        events = await read(connection)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta",) * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["delta"] for event in events[4:7]] == ["a", "", "é"]
    assert events[7]["text"] == events[8]["part"]["text"] == "aé"
    assert events[-1]["response"]["output"] == [events[9]["item"]]


async def test_five_thousand_tokens_in_one_burst_arrive_in_order(world: Any) -> None:  # P83
    """P60. No channel layer is involved: nothing is dropped at any capacity."""
    digits = "".join(str(i % 10) for i in range(5_000)).encode()
    world.worker.script.answer = digits
    world.worker.script.tokens_per_step = 5_000
    async with socket(world) as connection:
        await create(connection, max_output_tokens=6_000)
        events = await read(connection)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas).encode() == digits
    assert [event["sequence_number"] for event in events] == list(range(5_008))


async def test_instructions_and_items_become_the_prompt(world: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hey"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho"}]},
        {"role": "user", "content": "again"},
    ]
    async with socket(world) as connection:
        await create(connection, input=items, instructions="Be kind.")
        await read(connection)
    prompt = bytes(i if i < 256 else ord("|") for i in world.worker.submits[0].prompt_token_ids)
    assert prompt == b"|system\nBe kind.|\n|user\nHey|\n|assistant\nHo|\n|user\nagain|\n|assistant\n"


async def test_a_response_cut_by_length_is_incomplete_and_says_why(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection, max_output_tokens=5)
        response = (await read(connection))[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["content"][0]["text"] == "Hello"


async def test_a_cancel_stops_the_engine_and_ends_the_response_as_cancelled(world: Any) -> None:
    world.worker.script.answer = b"x" * 1_000
    world.worker.step_s = 0.005
    async with socket(world) as connection:
        await create(connection, max_output_tokens=1_000)
        events = [await read_one(connection) for _ in range(8)]
        await connection.send(json.dumps({"type": "response.cancel", "response_id": events[0]["response"]["id"]}))
        events += await read(connection)
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
        world.worker.script.answer = b"next"
        await create(connection)
        assert (await read(connection))[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    usage = next(message for message in world.usage_messages() if isinstance(message, Usage))
    assert usage.terminal == "cancelled_client"
    assert usage.output_tokens < 1_000


async def test_one_lane_runs_in_order_and_two_lanes_side_by_side(world: Any) -> None:
    world.worker.script.answer = b"0123456789"
    world.worker.step_s = 0.01
    async with socket(world) as connection:
        for stream_id in ("a", "a", "b"):
            await create(connection, stream_id=stream_id)
        events = await read(connection, ends=3)
    lanes = [event["stream_id"] for event in events]
    assert lanes.index("b") < len(lanes) - 1 - lanes[::-1].index("a")
    of_a = [event for event in events if event["stream_id"] == "a"]
    first_end = next(i for i, event in enumerate(of_a) if event["type"] == "response.completed")
    assert {e.get("response", {}).get("id") for e in of_a[: first_end + 1]} - {None} == {of_a[0]["response"]["id"]}
    assert of_a[first_end + 1]["type"] == "response.created"
    assert [event["sequence_number"] for event in of_a[first_end + 1 :]] == list(range(18))


async def test_a_socket_that_closes_cancels_what_still_runs(world: Any) -> None:
    world.worker.script.answer = b"x" * 1_000
    world.worker.step_s = 0.005
    async with socket(world) as connection:
        await create(connection, max_output_tokens=1_000, stream_id="a")
        await create(connection, max_output_tokens=1_000, stream_id="b")
        for _ in range(10):
            await read_one(connection)
    await world.until(lambda: len(world.worker.cancels) == 2, 2.0)
    await world.until(lambda: world.slots_in_use() == 0)
    terminals = [message.terminal for message in world.usage_messages() if isinstance(message, Usage)]
    assert terminals == ["cancelled_client"] * 2


@pytest.mark.parametrize(
    ("frame", "status", "code", "param"),
    [
        ("", 400, "invalid_request", None),
        ("{", 400, "invalid_request", None),
        ("[]", 400, "invalid_request", None),
        ('{"type": "response.steer"}', 400, "invalid_value", "type"),
        ('{"model": "simulated"}', 400, "missing_required_parameter", "type"),
        ('{"type": "response.create", "model": "simulated"}', 400, "missing_required_parameter", "input"),
        (
            '{"type": "response.create", "model": "simulated", "input": "x", "max_output_tokens": 0}',
            *(400, "invalid_value", "max_output_tokens"),
        ),
        (
            '{"type": "response.create", "model": "simulated", "input": "x", "max_output_tokens": 1000000000}',
            *(400, "context_length_exceeded", "max_output_tokens"),
        ),
        (
            '{"type": "response.create", "model": "simulated", "input": [{"role": "wizard", "content": "x"}]}',
            *(400, "invalid_value", "input[0].role"),
        ),
        (
            '{"type": "response.create", "model": "simulated", "input": "x", "previous_response_id": "resp_1"}',
            *(400, "unsupported_parameter", "previous_response_id"),
        ),
        ('{"type": "response.create", "model": "gpt-9", "input": "x"}', 404, "model_not_found", "model"),
        ('{"type": "response.cancel", "response_id": "resp_1"}', 404, "response_not_found", None),
        *(
            (f'{{"type": "{kind}", "response_id": "resp_1", "colour": 1}}', 400, "unknown_parameter", "colour")
            for kind in ("response.cancel", "response.resume")
        ),
        ('{"type": "response.create", "colour": 1}', 400, "unknown_parameter", "colour"),
        ('{"type": "ping", "colour": 1}', 400, "unknown_parameter", "colour"),
        ('{"type": "ping", "event_id": 1}', 400, "invalid_type", "event_id"),
        ('{"type": "ping", "stream_id": 1}', 400, "invalid_type", "stream_id"),
    ],
)
async def test_a_bad_frame_is_an_error_event_and_the_socket_stays_usable(
    world: Any, frame: str, status: int, code: str, param: str | None
) -> None:
    async with socket(world) as connection:
        await connection.send(frame)
        event = await read_one(connection)
        assert (event["type"], event["status"]) == ("error", status)
        assert (event["error"]["code"], event["error"]["param"]) == (code, param)
        assert world.usage_messages() == []
        await create(connection)
        assert (await read(connection))[-1]["type"] == "response.completed"


async def test_a_ping_is_answered_in_its_lane(world: Any) -> None:
    async with socket(world) as connection:
        await connection.send('{"type": "ping"}')
        assert await read_one(connection) == {"type": "pong"}
        await connection.send('{"type": "ping", "event_id": "e", "stream_id": "lane"}')
        assert await read_one(connection) == {"type": "pong", "stream_id": "lane"}


async def test_a_prompt_over_the_context_is_blamed_on_input(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection, input="x" * 40_000)
        (event,) = await read(connection)
    assert (event["error"]["code"], event["error"]["param"]) == ("context_length_exceeded", "input")


async def test_a_frame_over_the_body_limit_is_413_and_the_socket_stays_usable(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection, input="x" * 1_048_577)
        assert (await read_one(connection))["status"] == 413
        await create(connection)
        assert (await read(connection))[-1]["type"] == "response.completed"


async def test_a_limit_is_an_error_event_in_its_lane_with_the_headers_of_an_http_answer(world: Any) -> None:
    await world.set_quota(
        TenantClassPolicy(tenant_id="nova", priority_class=PriorityClass.DEFAULT, requests_per_minute=1)
    )
    async with socket(world, "nova") as connection:
        await create(connection, stream_id="lane")
        await read(connection)
        await create(connection, stream_id="lane")
        event = await read_one(connection)
    assert (event["type"], event["status"], event["stream_id"]) == ("error", 429, "lane")
    assert event["error"]["code"] == "rate_limit_exceeded"
    assert int(event["error"]["headers"]["retry-after"]) >= 1
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]


async def test_a_reject_after_the_response_was_announced_is_response_failed_and_free(world: Any) -> None:
    world.worker.script.reject = ("queue_wait", 3_000_000)
    async with socket(world) as connection:
        await create(connection)
        events = await read(connection)
        error = events[-1]["response"]["error"]
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
        assert error["headers"]["retry-after"] == "3"
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_more_lanes_than_allowed_are_refused(world: Any) -> None:
    world.worker.script.prompt_first = True
    async with socket(world) as connection:
        for number in range(17):
            await create(connection, stream_id=f"lane-{number}")
        event = next(e for e in [await read_one(connection) for _ in range(33)] if e["type"] == "error")
        assert (event["stream_id"], event["error"]["code"]) == ("lane-16", "websocket_stream_limit_reached")
