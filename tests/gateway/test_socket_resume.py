"""Responses that outlive their websocket: resumed, shown again, cancelled from another one."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.socket_client import create, read, read_one, socket


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
