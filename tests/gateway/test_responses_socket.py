"""The websocket /v1/responses through ``client.responses.connect()`` and by hand: events, lanes, cancel, errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import websockets

from gateway.runtime import set_current
from gateway.v1.socket_limits import open_sockets
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tenants import api_keys
from wire.bus import BusError
from wire.messages import Reserved, Usage

MODEL = "simulated"
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


@asynccontextmanager
async def socket(world: Any, key: str | None = "aurora", query: str = "") -> AsyncIterator[Any]:
    url = world.base_url.replace("http", "ws") + "/v1/responses" + query
    headers = {} if key is None else {"Authorization": f"Bearer {world.keys.get(key, key)}"}
    async with websockets.connect(url, additional_headers=headers, max_size=None) as connection:
        yield connection


async def create(connection: Any, **changes: Any) -> None:
    await connection.send(json.dumps({"type": "response.create", "model": MODEL, "input": "Hi", **changes}))


async def read_one(connection: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await asyncio.wait_for(connection.recv(), 10))
    return event


async def read(connection: Any, ends: int = 1) -> list[dict[str, Any]]:
    """Events up to and with the given number of terminal ones."""
    events = []
    while sum(event["type"] in TERMINAL for event in events) < ends:
        events.append(await read_one(connection))
    return events


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


@pytest.mark.parametrize(
    ("key", "query"),
    [(None, ""), ("nonsense", ""), (api_keys.make("test").text, ""), (None, "?api_key=QUERY")],
    ids=["no key", "malformed", "unknown", "in the query string"],
)
async def test_a_socket_without_a_good_key_gets_an_error_event_and_is_closed_for_good(
    world: Any, key: str | None, query: str
) -> None:
    """P70, the half of keys."""
    async with socket(world, key, query.replace("QUERY", world.keys["aurora"])) as connection:
        event = await read_one(connection)
        assert (event["type"], event["status"], event["error"]["code"]) == ("error", 401, "invalid_api_key")
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await connection.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401
    assert world.worker.submits == []


async def test_a_revoked_key_ends_its_socket_at_the_next_response(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection)
        await read(connection)
        world.shelf.stored.clear()
        world.runtime.keys.forget(None)
        await create(connection)
        assert (await read_one(connection))["status"] == 401
        with pytest.raises(websockets.ConnectionClosed):
            await connection.recv()


async def test_a_key_revoked_while_the_socket_is_quiet_closes_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.v1.responses_socket.KEY_CHECK_S", 0.05)
    async with socket(world) as connection:
        await asyncio.sleep(0)
        world.shelf.stored.clear()
        world.runtime.keys.forget(None)
        assert (await read_one(connection))["status"] == 401


async def read_for_ever(connection: Any) -> None:
    async with asyncio.timeout(10):
        while True:
            await connection.recv()


async def closed_with(connection: Any) -> int:
    """The code of the close that comes next, whatever comes before it."""
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await read_for_ever(connection)
    assert closed.value.rcvd is not None
    code: int = closed.value.rcvd.code
    return code


async def test_a_push_about_a_revoked_key_ends_its_sockets_and_what_they_run_at_once(world: Any) -> None:  # P44
    world.worker.script.answer = b"x" * 4_000
    world.worker.step_s = 0.02
    async with socket(world) as connection:
        await create(connection, max_output_tokens=4_000)
        await read_one(connection)
        world.shelf.stored.clear()
        revoked_at_s = time.monotonic()
        world.runtime.keys.forget(None)
        assert await closed_with(connection) == 4401
        assert time.monotonic() - revoked_at_s < 4  # far less than the next look without a push
    await world.until(lambda: world.slots_in_use() == 0)


async def test_a_stream_over_http_of_a_revoked_key_ends_with_a_clear_code_and_one_of_another_goes_on(
    world: Any,
) -> None:  # P44
    world.worker.script.answer = b"x" * 80
    world.worker.step_s = 0.02
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 400}
    mine = await world.client().chat.completions.create(**ask)
    other = await world.client("bulk").chat.completions.create(**ask)
    await anext(aiter(mine))
    del world.shelf.stored[world.keys["aurora"].split("_")[2]]
    world.runtime.keys.forget(world.keys["aurora"].split("_")[2])
    with pytest.raises(openai.APIError, match="revoked") as caught:
        async for _ in mine:
            pass
    assert caught.value.code == "invalid_api_key"
    assert len([chunk async for chunk in other if chunk.choices[0].delta.content]) == 80
    await world.until(lambda: world.slots_in_use() == 0)
    (cancel,) = [cancel for _, cancel in world.worker.cancels]
    assert cancel.reason == "admin"


async def test_a_quiet_socket_beats_and_a_ping_is_answered(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P69. Either side learns within 20 s that the other has gone."""
    monkeypatch.setattr("gateway.v1.responses_socket.HEARTBEAT_S", 0.05)
    async with socket(world) as connection:
        assert [(await read_one(connection))["type"] for _ in range(2)] == ["keepalive"] * 2
        await asyncio.wait_for(await connection.ping(), 5)
        await create(connection)
        kinds = {event["type"] for event in await read(connection)}
        assert "response.completed" in kinds
    async with world.client().responses.connect() as official:
        assert (await official.recv()).type == "keepalive"


async def test_a_socket_that_sends_too_many_frames_is_closed(world: Any) -> None:
    async with socket(world) as connection:
        for _ in range(300):
            await connection.send("{}")
        assert await closed_with(connection) == 4429


async def test_a_key_holds_only_so_many_sockets_and_one_more_when_one_has_closed(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.v1.socket_limits.SOCKETS_OF_A_KEY", 1)
    async with socket(world) as first:
        await create(first)
        await read(first)
        async with socket(world) as second:
            event = await read_one(second)
            assert (event["status"], event["error"]["code"]) == (429, "websocket_connection_limit_reached")
            assert await closed_with(second) == 4429
        async with socket(world, "bulk") as other:
            await create(other)
            await read(other)
    await world.until(lambda: not open_sockets.num_of("key-aurora"))
    async with socket(world) as third:
        await create(third)
        assert (await read(third))[-1]["type"] == "response.completed"


async def test_a_failure_of_ours_closes_the_socket_with_1011_and_a_silent_bus_is_an_error_event(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_bus(*_: Any, **__: Any) -> None:
        raise BusError("gone")

    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.runtime.continuity, "find", no_bus)
    name = "resp_01a22a0e-e3d9-7dbd-bc89-266a6cb15e7a"
    async with socket(world) as connection:
        await connection.send(json.dumps({"type": "response.cancel", "response_id": name}))
        assert (await read_one(connection))["error"]["code"] == "service_unavailable"
        await connection.send(json.dumps({"type": "response.resume", "response_id": name}))
        assert (await read_one(connection))["error"]["code"] == "service_unavailable"
        monkeypatch.setattr(world.runtime.continuity, "find", broken)
        await connection.send(json.dumps({"type": "response.resume", "response_id": name}))
        assert await closed_with(connection) == 1011


async def test_no_socket_lives_longer_than_an_hour(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.v1.responses_socket.LIFE_S", 0.2)
    monkeypatch.setattr("gateway.v1.responses_socket.KEY_CHECK_S", 0.05)
    async with socket(world) as connection:
        assert await closed_with(connection) == 1012


async def test_a_gateway_that_is_not_ready_closes_with_1013(world: Any) -> None:
    set_current(None)
    try:
        async with socket(world) as connection:
            assert await closed_with(connection) == 1013
    finally:
        set_current(world.runtime)


async def test_more_lanes_than_allowed_are_refused(world: Any) -> None:
    world.worker.script.prompt_first = True
    async with socket(world) as connection:
        for number in range(17):
            await create(connection, stream_id=f"lane-{number}")
        event = next(e for e in [await read_one(connection) for _ in range(33)] if e["type"] == "error")
        assert (event["stream_id"], event["error"]["code"]) == ("lane-16", "websocket_stream_limit_reached")


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/chat/completions", "/v1/Responses", "/elsewhere", "/"])
async def test_a_socket_elsewhere_is_refused_at_the_handshake_in_the_shape_of_every_error(
    world: Any, path: str
) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        await websockets.connect(world.base_url.replace("http", "ws") + path)
    answer = caught.value.response
    told = json.loads(answer.body)["error"]
    assert (answer.status_code, told["code"], told["message"]) == (
        404,
        "route_not_found",
        f"There is no websocket at {path}.",
    )
    assert answer.headers["x-request-id"].startswith("req_")


async def resume(connection: Any, name: str, starting_after: int, stream_id: str | None = None) -> None:
    frame = {"type": "response.resume", "response_id": name, "starting_after": starting_after, "stream_id": stream_id}
    await connection.send(json.dumps({key: value for key, value in frame.items() if value is not None}))


async def test_a_background_response_outlives_its_socket_and_is_resumed_on_another(world: Any) -> None:
    """P63, P67: no gap and no repeat across a lost socket."""
    world.worker.script.answer = bytes(97 + i % 26 for i in range(120))
    world.worker.step_s = 0.004
    async with socket(world) as connection:
        await create(connection, background=True, max_output_tokens=200)
        events = [await read_one(connection) for _ in range(20)]
    name = events[0]["response"]["id"]
    async with socket(world) as connection:
        await resume(connection, name, events[-1]["sequence_number"], "again")
        rest = await read(connection)
    assert {event.pop("stream_id") for event in rest} == {"again"}
    assert [event["sequence_number"] for event in events + rest] == list(range(128))
    deltas = [e["delta"] for e in events + rest if e["type"] == "response.output_text.delta"]
    assert "".join(deltas).encode() == world.worker.script.answer
    assert world.worker.cancels == []


async def test_a_finished_response_is_shown_again_from_any_event(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection)
        events = await read(connection)
        await resume(connection, events[0]["response"]["id"], 9)
        assert await read(connection) == events[10:]


async def test_what_another_tenant_or_nobody_asked_for_cannot_be_resumed_or_cancelled(world: Any) -> None:
    async with socket(world) as connection:
        await create(connection, background=True)
        name = (await read(connection))[0]["response"]["id"]
    async with socket(world, "bulk") as connection:
        for frame in (
            {"type": "response.resume", "response_id": name},
            {"type": "response.resume", "response_id": "resp_nonsense"},
            {"type": "response.cancel", "response_id": name},
        ):
            await connection.send(json.dumps(frame))
            event = await read_one(connection)
            assert (event["status"], event["error"]["code"]) == (404, "response_not_found")


async def test_a_response_can_be_cancelled_from_another_socket(world: Any) -> None:
    world.worker.script.answer = b"x" * 500
    world.worker.step_s = 0.004
    async with socket(world) as first, socket(world) as second:
        await create(first, max_output_tokens=500)
        events = [await read_one(first) for _ in range(6)]
        await second.send(json.dumps({"type": "response.cancel", "response_id": events[0]["response"]["id"]}))
        assert (await read(first))[-1]["response"]["status"] == "cancelled"


async def test_a_socket_whose_frame_stands_for_too_long_is_dropped_with_all_it_wanted(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P64. The server's own send may wait for ever, and nobody else waits with it."""
    monkeypatch.setattr("gateway.v1.responses_socket.STUCK_S", 0.2)
    never = asyncio.Event()

    async def stuck(self: Any, text: str) -> None:
        await never.wait()

    monkeypatch.setattr("gateway.v1.outgoing.Outgoing._pass_on", stuck)
    world.worker.script.answer = b"x" * 400
    world.worker.step_s = 0.004
    async with socket(world) as connection:
        for stream_id in ("a", "b"):
            await create(connection, stream_id=stream_id, max_output_tokens=400)
            await create(connection, stream_id=stream_id, max_output_tokens=400)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await asyncio.wait_for(connection.recv(), 10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4408
    await world.until(lambda: world.slots_in_use() == 0)
    assert len(world.worker.submits) == 2
