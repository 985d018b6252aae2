"""Clients that come and go by the thousand: nobody else loses an event, and memory comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import websockets

from tests.end_to_end.running_up import Up

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy",)
NUM_CYCLES, NUM_WARM, NUM_AT_ONCE = 20_000, 1_000, 32
GROWTH = 1.10
HEALTHY, RESTLESS = 3, 4
LASTS_S = 60.0


def socket(platform: Up, tenant: str = "aurora") -> Any:
    demo = platform.demo
    url = demo["base_url"].replace("http", "ws") + "/v1/responses"
    return websockets.connect(url, additional_headers={"Authorization": f"Bearer {demo['keys'][tenant]}"})


def frame(platform: Up, tokens: int) -> str:
    wanted = {"type": "response.create", "model": platform.demo["model"], "input": "the river", "ignore_eos": True}
    return json.dumps({**wanted, "max_output_tokens": tokens})


async def test_sockets_that_come_and_go_take_no_event_from_those_that_stay(platform: Up) -> None:  # P61
    over = asyncio.Event()
    num_read = 0

    async def stays() -> None:
        nonlocal num_read
        async with socket(platform) as connection:
            while not over.is_set():
                await connection.send(frame(platform, 200))
                expected = 0
                while True:
                    event = json.loads(await asyncio.wait_for(connection.recv(), 30))
                    if event["type"] == "keepalive":
                        continue
                    assert event["type"] != "error", event
                    assert event["sequence_number"] == expected
                    expected += 1
                    num_read += 1
                    if event["type"] in ("response.completed", "response.incomplete"):
                        break

    async def comes_and_goes() -> None:
        while not over.is_set():
            async with socket(platform) as connection:
                await connection.send(frame(platform, 500))
                await connection.recv()

    tasks = [asyncio.create_task(stays()) for _ in range(HEALTHY)]
    tasks += [asyncio.create_task(comes_and_goes()) for _ in range(RESTLESS)]
    await asyncio.wait(tasks, timeout=LASTS_S, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    await asyncio.gather(*tasks)
    assert num_read > 1_000


async def test_twenty_thousand_streams_that_break_off_leave_no_memory_behind(platform: Up) -> None:  # P65
    where = urlsplit(platform.demo["base_url"])
    body = json.dumps(
        {
            "model": platform.demo["model"],
            "messages": [{"role": "user", "content": "the river"}],
            "stream": True,
            "max_tokens": 50,
            "ignore_eos": True,
            "service_tier": "default",
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {platform.demo['keys']['bulk']}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    gate = asyncio.Semaphore(NUM_AT_ONCE)
    statuses: dict[bytes, int] = {}

    async def broken_off() -> bytes:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(head + body)
        status = (await asyncio.wait_for(reader.readline(), 60))[9:12]
        await reader.read(2_048)  # some tokens
        writer.transport.abort()
        return status

    async def cycle() -> None:
        async with gate:
            while True:
                status = await broken_off()
                if status != b"429":  # a quick machine meets the tenant's requests per minute
                    break
                await asyncio.sleep(1)
        statuses[status] = statuses.get(status, 0) + 1

    await asyncio.gather(*(cycle() for _ in range(NUM_WARM)))
    await asyncio.sleep(5)
    before = memory_of(platform)
    for _ in range(NUM_CYCLES // NUM_WARM):
        await asyncio.gather(*(cycle() for _ in range(NUM_WARM)))
    await asyncio.sleep(5)
    after = memory_of(platform)
    assert statuses.get(b"200", 0) > NUM_CYCLES * 0.99, statuses
    assert after <= before * GROWTH, (before, after)


def memory_of(platform: Up) -> int:
    """Bytes that the gateway's processes hold."""
    leader = psutil.Process(platform.pid_of("gateway"))
    held: int = sum(one.memory_info().rss for one in [leader, *leader.children(recursive=True)])
    return held
