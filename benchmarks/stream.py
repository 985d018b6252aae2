"""How many tokens one CPU second of the gateway passes on to many readers: server-sent events, then websockets.

The device costs nothing (``--executor simulated --device-profile instant``); every reader checks that its events come
in order and without a gap, by their sequence numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import websockets

from benchmarks.chats import LIMIT_S, ServerRefused, check_answer
from benchmarks.figures import machine, report, say
from benchmarks.gateway import Family, open_target
from benchmarks.serving import Target

DELTA, LAST = "response.output_text.delta", ("response.completed", "response.incomplete")


class Order:
    """One reader's events. Always: each number is the last one's successor, or ServerRefused says which was not."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._next = 0

    def take(self, event: dict[str, Any]) -> bool:
        """True for the last event. Raises ServerRefused."""
        if event["type"] == "error" or event["sequence_number"] != self._next:
            raise ServerRefused(f"event {self._next} was expected, and this came: {json.dumps(event)[:300]}")
        self._next += 1
        self.num_tokens += event["type"] == DELTA
        return event["type"] in LAST


def _request(target: Target, num_tokens: int) -> dict[str, Any]:
    return {"model": target.model, "input": "Go on.", "max_output_tokens": num_tokens, "ignore_eos": True}


async def _over_http(client: httpx2.AsyncClient, target: Target, num_tokens: int) -> int:
    order = Order()
    body = {**_request(target, num_tokens), "stream": True}
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        if answer.status_code != 200:
            check_answer(answer.status_code, (await answer.aread()).decode(errors="replace"))
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                order.take(json.loads(line.removeprefix("data:")))
    return order.num_tokens


async def _over_websocket(target: Target, num_tokens: int) -> int:
    order = Order()
    headers = {"Authorization": f"Bearer {target.keys['aurora']}"}
    url = target.base_url.replace("http", "ws", 1) + "/v1/responses"
    async with websockets.connect(url, additional_headers=headers, compression=None, open_timeout=LIMIT_S) as socket:
        await socket.send(json.dumps({"type": "response.create", **_request(target, num_tokens)}))
        while not order.take(json.loads(await socket.recv())):
            pass
    return order.num_tokens


async def _measured(family: Family, readers: Sequence[Any], num_tokens: int) -> dict[str, Any]:
    before, started = family.cpu_s(), time.perf_counter()
    counts = await asyncio.gather(*readers)
    seconds, after = time.perf_counter() - started, family.cpu_s()
    if any(count != num_tokens for count in counts):
        raise ServerRefused(f"of {num_tokens} tokens each, the readers saw {min(counts)} to {max(counts)}")
    total, cpu_s = sum(counts), after["gateway"] - before["gateway"]
    return {
        "tokens": total,
        "tokens_per_s": round(total / seconds),
        "tokens_per_gateway_cpu_s": round(total / cpu_s) if cpu_s else None,
        "worker_cpu_s": round(after["worker"] - before["worker"], 2),
        "gateway_cpu_s": round(cpu_s, 2),
    }


async def measure(target: Target, *, num_readers: int, num_tokens: int) -> dict[str, Any]:
    """Raises ServerRefused, HTTPError, OSError."""
    family = Family(target.port)
    limits = httpx2.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {target.keys['aurora']}"}
    async with httpx2.AsyncClient(base_url=target.base_url, headers=headers, timeout=LIMIT_S, limits=limits) as client:
        await _over_http(client, target, 8)
        over_http = [_over_http(client, target, num_tokens) for _ in range(num_readers)]
        found = {"sse": await _measured(family, over_http, num_tokens)}
    over_websocket = [_over_websocket(target, num_tokens) for _ in range(num_readers)]
    return {**found, "websocket": await _measured(family, over_websocket, num_tokens)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream", description=__doc__)
    parser.add_argument("--demo-file", type=Path, help="demo.json of a running platform (one of our own)")
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=400, help="of each reader; Aurora may use 600,000 a minute")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if min(found.readers, found.tokens) < 1:
        parser.error("--readers and --tokens must be at least 1")
    try:
        with open_target(found.demo_file, "instant") as target:
            say(f"{found.readers} readers, {found.tokens} tokens each, from {target.base_url}")
            result = asyncio.run(measure(target, num_readers=found.readers, num_tokens=found.tokens))
    except (ServerRefused, httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"the benchmark broke off: {error}\n")
        return 1
    report({"bench": "stream", "readers": found.readers, **result, **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
