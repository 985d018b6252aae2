"""A client of the websocket /v1/responses, by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import websockets

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
