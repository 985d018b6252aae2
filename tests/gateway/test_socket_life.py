"""When the websocket /v1/responses opens and how it ends: keys, bounds, silence, failures, a gateway that goes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
import websockets

from gateway.auth import KeyStoreDown
from gateway.runtime import set_current
from gateway.v1.responses_socket import ResponsesConsumer
from gateway.v1.socket_limits import open_sockets
from tenants import api_keys
from tests.gateway.socket_client import MODEL, create, read, read_one, socket
from wire.bus import BusError


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


@pytest.mark.parametrize("query", ["?colour=red", "?model=simulated", "?stream=true&stream=true", "?colour"])
async def test_a_query_of_a_socket_is_refused_by_name_and_no_frame_behind_it_is_obeyed(world: Any, query: str) -> None:
    async with socket(world, query=query) as connection:
        await create(connection)
        event = await read_one(connection)
        assert (event["type"], event["status"], event["error"]["code"]) == ("error", 400, "unknown_parameter")
        assert event["error"]["param"] == query[1:].partition("=")[0]
        assert await closed_with(connection) == 4400
    assert world.worker.submits == []


async def test_a_frame_that_comes_while_the_socket_is_being_closed_is_not_obeyed(world: Any) -> None:
    frames: list[dict[str, Any]] = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": '{"type": "ping"}'},
        {"type": "websocket.disconnect", "code": 1000},
    ]
    sent = []

    async def receive() -> dict[str, Any]:
        for _ in range(50):  # whatever is about to be sent leaves first
            await asyncio.sleep(0)
        return frames.pop(0)

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {world.keys['aurora']}".encode())]
    scope = {"type": "websocket", "path": "/v1/responses", "query_string": b"colour=red", "headers": headers}
    await ResponsesConsumer.as_asgi()(scope, receive, keep)
    assert [message["type"].removeprefix("websocket.") for message in sent] == ["accept", "send", "close"]


async def test_a_bad_key_is_said_before_a_bad_query(world: Any) -> None:
    async with socket(world, "nonsense", "?colour=red") as connection:
        assert (await read_one(connection))["error"]["code"] == "invalid_api_key"
        assert await closed_with(connection) == 4401


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


async def test_while_keys_cannot_be_checked_a_new_socket_is_told_to_come_again_and_an_open_one_stays(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with socket(world) as opened:
        await create(opened)
        await read(opened)

        async def refuse(_: str) -> None:
            raise KeyStoreDown("no answer")

        monkeypatch.setattr(world.runtime.keys, "_lookup", refuse)
        world.runtime.keys.forget(None)
        async with socket(world) as connection:
            assert (await read_one(connection))["status"] == 503
            assert await closed_with(connection) == 1013
        await create(opened)
        assert (await read_one(opened))["status"] == 503
        monkeypatch.undo()
        await create(opened)
        assert (await read(opened))[-1]["type"] == "response.completed"


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
