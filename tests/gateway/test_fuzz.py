"""Bodies, frames and queries that nobody would write: no server error, no hang, and the next good request is served.

FUZZ_S sets how long the soaked half goes on (two minutes); a failure names its seed and what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from typing import Any

import httpx2
import pytest
import websockets

SECONDS = float(os.environ.get("FUZZ_S", 120))
HANG_S = 15.0
MODEL = "simulated"
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 3},
}
LANE, ENDS = "the good one", ("response.completed", "response.incomplete", "error")
FIELDS = (
    *("model", "messages", "prompt", "input", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
    *("logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "service_tier", "deadline_ms", "max_queue_wait_ms"),
    *("user", "metadata", "store", "tools", "n", "logprobs", "top_logprobs", "response_format", "max_tokens", "echo"),
    *(
        "text",
        "background",
        "instructions",
        "type",
        "stream_id",
        "response_id",
        "starting_after",
        "completion_deadline_ms",
    ),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, 1e-320, "", " ", "\0", "\ud800"),
    *("x" * 5_000, "é" * 300, "\u202e", "auto", "flex", "priority", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}),
    *([{"role": "user", "content": "Hi"}], [{"role": "tool", "content": [{"type": "text", "text": "x"}]}]),
    *({"65": 1}, {"-1": 1}, {"1e9": 200}, {"include_usage": True}, {"type": "json_object"}, [1, 2, 3], [[1], ["a"]]),
    *({"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, "response.create"),
    *(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        "response.cancel",
        "response.resume",
    ),
)
PATHS = (
    *("/v1/responses/{}", "/v1/responses/{}/cancel", "/v1/responses/{}/input_items", "/v1/models/{}", "/v1/{}"),
    *(
        "/v1/responses/{}?stream=true&starting_after={}",
        "/v1/responses/{}/input_items?limit={}&after={}",
        "/v1/files/{}",
    ),
)
WORDS = (
    "resp_1",
    "resp_01a22a0e-e3d9-7dbd-bc89-266a6cb15e7a",
    "%00",
    "-1",
    "9" * 40,
    "é",
    "a b",
    "%ff",
)


def spoiled(chance: random.Random, body: dict[str, Any]) -> bytes:
    """A good body with some fields changed, or bytes that are hardly JSON any more."""
    changed = dict(body)
    for _ in range(chance.randint(1, 4)):
        changed[chance.choice(FIELDS)] = chance.choice(ODD)
    text = json.dumps(changed).encode("utf-8", "surrogatepass")
    kind = chance.random()
    if kind < 0.1:
        return text[: chance.randrange(len(text))]
    if kind < 0.2:
        place = chance.randrange(len(text))
        return text[:place] + chance.randbytes(chance.randint(1, 4)) + text[place:]
    if kind < 0.22:
        return b"[" * chance.choice((10, 5_000)) + text
    return text


async def over_http(world: Any, chance: random.Random) -> None:
    """One request. Every answer comes in time, is no failure of ours, and a refusal has the error's shape."""
    headers = {"authorization": f"Bearer {world.keys['aurora']}", "content-type": "application/json"}
    path, method, body = chance.choice(list(GOOD)), "POST", b""
    if chance.random() < 0.2:
        path = chance.choice(PATHS).format(*(chance.choice(WORDS) for _ in range(3)))
        method = chance.choice(("GET", "POST", "DELETE", "PUT"))
    else:
        body = spoiled(chance, GOOD[path])
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers, timeout=HANG_S) as client:
        answer = await client.request(method, path, content=body)
    assert answer.status_code not in (500, 502), (path, body, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (path, body, answer.text)


async def over_a_socket(world: Any, chance: random.Random) -> None:
    """Some frames, then a good one in a lane of its own, which is served unless the socket was closed for a reason."""
    url = world.base_url.replace("http", "ws") + "/v1/responses"
    headers = {"Authorization": f"Bearer {world.keys['aurora']}"}
    good = {"type": "response.create", **GOOD["/v1/responses"]}
    sent = [spoiled(chance, good) for _ in range(chance.randint(1, 6))]
    closed = None
    async with websockets.connect(url, additional_headers=headers, max_size=None) as connection:
        try:
            for frame in sent:
                as_text = chance.random() < 0.8
                await connection.send(frame.decode("utf-8", "replace") if as_text else frame)
            await connection.send(json.dumps({**good, "stream_id": LANE}))
            async with asyncio.timeout(HANG_S):
                await _until_served(connection, sent)
        except websockets.ConnectionClosed as error:
            closed = error
    assert closed is None or (closed.rcvd is not None and closed.rcvd.code != 1011), (sent, closed)


async def _until_served(connection: Any, sent: list[bytes]) -> None:
    while True:
        event = json.loads(await connection.recv())
        assert event.get("status") not in (500, 502), (sent, event)
        if event.get("stream_id") == LANE and event["type"] in ENDS:
            return


async def fuzz(world: Any, seed: int) -> None:
    chance = random.Random(seed)
    with contextlib.suppress(UnicodeEncodeError, httpx2.InvalidURL):  # the client itself would not send it
        await (over_http if chance.random() < 0.7 else over_a_socket)(world, chance)


async def nothing_is_left(world: Any) -> None:
    """Background responses run to their end; then no slot is held."""
    await world.until(lambda: world.slots_in_use() == 0, 30)
    answer = await world.client().chat.completions.create(**GOOD["/v1/chat/completions"])
    assert answer.choices[0].message.content == "Hel"


async def test_a_hundred_spoiled_requests_and_sockets_are_refused_or_served(world: Any) -> None:
    for seed in range(100):
        await fuzz(world, seed)
    await nothing_is_left(world)


@pytest.mark.soak
async def test_the_door_is_fuzzed_for_as_long_as_one_likes(world: Any) -> None:
    ends_at_s, seed = time.monotonic() + SECONDS, 1_000
    while time.monotonic() < ends_at_s:
        await asyncio.gather(*(fuzz(world, seed + n) for n in range(4)))
        seed += 4
    await nothing_is_left(world)
