"""Answers that outlive a kill -9 of what serves them, and readers that do not read, on the whole platform."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
import redis
import websockets
from django.conf import settings
from openai import AsyncOpenAI

from gpu_worker.simulated import readable_tokens
from tests.end_to_end.running_up import Up
from wire import vocabulary

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy", "--kv-mib=24")
LONG: dict[str, Any] = {"max_output_tokens": 1_500, "extra_body": {"ignore_eos": True}}
SAID_WITHIN_S = 180.0  # a socket's buffers take megabytes before it is stuck
NUM_WISHES = 16 * 12  # fewer than a socket may send at once
DROPPED_WITHIN_S = 60.0


def has_neither_gap_nor_repeat(texts: Sequence[str]) -> bool:
    """The simulated executor makes every token from the one before: seven further on among the readable ones."""
    words = vocabulary.load(settings.RUBATO_DEMO_MODEL_PATH)
    readable = readable_tokens(words.token_bytes, words.stop_token_ids)
    place_of = {words.token_bytes[token_id].decode(): place for place, token_id in enumerate(readable)}
    places = [place_of[text] for text in texts]
    return all((after - before) % len(readable) == 7 for before, after in itertools.pairwise(places))


def client_of(platform: Up) -> AsyncOpenAI:
    demo = platform.demo
    return AsyncOpenAI(base_url=demo["base_url"] + "/v1", api_key=demo["keys"]["aurora"], max_retries=0)


async def resumed(platform: Up, name: str, after: int) -> list[Any]:
    """The rest of the events, from whichever gateway answers, as soon as one does."""
    deadline = time.monotonic() + 60
    async with client_of(platform) as client:
        while True:
            assert time.monotonic() < deadline
            try:
                stream = await client.responses.retrieve(name, stream=True, starting_after=after)
                return [event async for event in stream]
            except (openai.APIConnectionError, httpx2.TransportError):
                await asyncio.sleep(0.1)


async def read_and_kill(stream: Any, seen: list[Any], pid: int) -> None:
    """Reads to the end, and kills a process at the hundredth event."""
    async for event in stream:
        seen.append(event)
        if len(seen) == 100:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_background_answer_outlives_its_gateway_and_is_read_on_without_gap_or_repeat(
    platform: Up, seed: int
) -> None:
    seen: list[Any] = []
    killed = platform.pid_of("gateway")
    async with client_of(platform) as client:
        stream = await client.responses.create(
            model=platform.demo["model"], input=f"number {seed}", background=True, stream=True, **LONG
        )
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            await read_and_kill(stream, seen, killed)
    seen += await resumed(platform, seen[0].response.id, seen[-1].sequence_number)
    assert [event.sequence_number for event in seen] == list(range(1_508))
    assert has_neither_gap_nor_repeat([e.delta for e in seen if e.type == "response.output_text.delta"])
    await asyncio.to_thread(books_are_right, platform)


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_answer_outlives_its_worker_without_its_reader_noticing_more_than_a_pause(
    platform: Up, seed: int
) -> None:
    killed = platform.pid_of("worker")
    chunks: list[Any] = []
    async with client_of(platform) as client:
        stream = await client.chat.completions.create(
            model=platform.demo["model"],
            messages=[{"role": "user", "content": f"number {seed}"}],
            stream=True,
            max_completion_tokens=1_500,
            extra_body={"ignore_eos": True},
        )
        await read_and_kill(stream, chunks, killed)
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert len(texts) == 1_500
    assert has_neither_gap_nor_repeat(texts)
    await asyncio.to_thread(books_are_right, platform)


def books_are_right(platform: Up) -> None:
    found = platform.reconcile(60)
    assert found["is_right"], (found, platform.said)
    assert found["gate"]["open_micros"] == found["ledger_money"]["open_micros"] == 0, found


def small_socket(platform: Up) -> socket.socket:
    """Takes so little that a server soon cannot send."""
    where = urlsplit(platform.demo["base_url"])
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.connect((where.hostname, where.port))
    return connection


async def until_it_is_said(platform: Up, since: int) -> None:
    """That somebody does not read."""

    def is_said() -> bool:
        said = platform.said[since:]
        return "a websocket has not been read" in said or "is not being read" in said

    await asyncio.to_thread(platform.wait_for, is_said, SAID_WITHIN_S)


async def until_nobody_is_served(platform: Up) -> None:
    with redis.Redis.from_url(platform.addresses["REDIS_URL"]) as gate_keeper:
        await _until(lambda: not list(gate_keeper.scan_iter("rubato:lease:*", _type="zset")))


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DROPPED_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def test_a_websocket_that_is_never_read_is_dropped_with_all_it_queued(platform: Up) -> None:
    """P64, the half of one frozen reader: closed at its own limit, and what it still wanted is never made."""
    url = platform.demo["base_url"].replace("http", "ws") + "/v1/responses"
    headers = {"Authorization": f"Bearer {platform.demo['keys']['aurora']}"}
    said_before = len(platform.said)
    connection = small_socket(platform)
    async with websockets.connect(
        url, sock=connection, additional_headers=headers, compression=None, max_queue=1, ping_interval=None
    ) as frozen:
        for number in range(NUM_WISHES):
            request = {"type": "response.create", "stream_id": f"lane-{number % 16}", "model": platform.demo["model"]}
            await frozen.send(json.dumps({**request, "input": "x", "max_output_tokens": 1_800, "ignore_eos": True}))
        frozen.transport.pause_reading()
        await until_it_is_said(platform, said_before)
        await until_nobody_is_served(platform)
        with redis.Redis.from_url(platform.addresses["REDIS_URL"]) as gate_keeper:
            records = len(list(gate_keeper.scan_iter("rubato:response:*")))
        assert 0 < records < NUM_WISHES
        frozen.transport.abort()
    await asyncio.to_thread(books_are_right, platform)


async def test_an_event_stream_that_is_never_read_is_dropped_too(platform: Up) -> None:
    """Sixteen choices at once: more bytes than the sockets on both sides hold."""
    said_before = len(platform.said)
    connection = small_socket(platform)
    body = {"model": platform.demo["model"], "messages": [{"role": "user", "content": "x"}], "stream": True}
    payload = json.dumps({**body, "max_tokens": 1_900, "ignore_eos": True, "n": 16}).encode()
    key = platform.demo["keys"]["aurora"]
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nauthorization: Bearer {key}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    await until_it_is_said(platform, said_before)
    await until_nobody_is_served(platform)
    async with httpx2.AsyncClient(base_url=platform.demo["base_url"]) as client:
        deadline = time.monotonic() + 10
        while 'rubato_streams_open{kind="sse"} 0.0' not in (await client.get("/metrics")).text:
            assert time.monotonic() < deadline
    connection.close()
    await asyncio.to_thread(books_are_right, platform)
