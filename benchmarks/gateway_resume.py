"""How soon an answer is read on: after its socket was lost, and after Redis dropped every connection under it.

Part of ``benchmarks.gateway``. Reads long background answers of the Responses API, and counts on their event numbers: a
gap or a repeat is ServerRefused, not a figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from redis.asyncio import Redis

from benchmarks.chats import ServerRefused
from benchmarks.figures import quantiles_ms
from benchmarks.serving import Target

READ_BEFORE = 30  # events of an answer before something is broken


async def measure(target: Target, *, times: int) -> dict[str, Any]:
    """Milliseconds to the next event; empty for a platform that is not ours. Raises ServerRefused, HTTPError."""
    if target.data is None:
        return {}
    addresses = json.loads((target.data / "services.json").read_text())
    headers = {"Authorization": f"Bearer {target.keys['aurora']}"}
    lost, cut = [], []
    async with (
        Redis.from_url(addresses["REDIS_URL"]) as redis,
        httpx2.AsyncClient(base_url=target.base_url, headers=headers, timeout=60) as client,
    ):
        for _ in range(times):
            lost.append(await _after_a_lost_socket(client, target.model))
            cut.append(await _after_a_cut(client, target.model, redis))
    return {"lost_socket_ms": quantiles_ms(lost), "redis_connections_cut_ms": quantiles_ms(cut)}


async def _after_a_lost_socket(client: httpx2.AsyncClient, model: str) -> float:
    """From asking again to the first event that had not been seen."""
    name, last = "", -1
    async with _stream(client, "POST", "/v1/responses", model) as answer:
        async for event in _events(answer, last):
            name, last = event.get("response", {}).get("id", name), event["sequence_number"]
            if last == READ_BEFORE:
                break
    began = time.perf_counter()
    path = f"/v1/responses/{name}?stream=true&starting_after={last}"
    async with client.stream("GET", path) as answer:
        async for _ in _events(answer, last):
            break
    took_s = time.perf_counter() - began
    await client.post(f"/v1/responses/{name}/cancel")
    return took_s


async def _after_a_cut(client: httpx2.AsyncClient, model: str, redis: Redis) -> float:
    """The longest silence between two events of a stream under which Redis' connections were cut."""
    name, longest_s, before = "", 0.0, 0.0
    async with _stream(client, "POST", "/v1/responses", model) as answer:
        async for event in _events(answer, -1):
            now = time.perf_counter()
            name, number = event.get("response", {}).get("id", name), event["sequence_number"]
            if number == READ_BEFORE:
                await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            elif number > READ_BEFORE:
                longest_s = max(longest_s, now - before)
            before = now
            if number == 10 * READ_BEFORE:
                break
    await client.post(f"/v1/responses/{name}/cancel")
    return longest_s


def _stream(client: httpx2.AsyncClient, method: str, path: str, model: str) -> Any:
    ask = {"model": model, "input": "river", "stream": True, "background": True}
    return client.stream(method, path, json={**ask, "max_output_tokens": 1_500, "ignore_eos": True})


async def _events(answer: httpx2.Response, last: int) -> AsyncIterator[dict[str, Any]]:
    """Those after ``last``, each following the one before."""
    if answer.status_code != 200:
        raise ServerRefused(f"the server answered {answer.status_code}: {(await answer.aread())[:300]!r}")
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            event = json.loads(line[5:])
            if event.get("sequence_number") != last + 1:
                raise ServerRefused(f"event {event} follows number {last}")
            last += 1
            yield event
