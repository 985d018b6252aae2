"""The real parts together: granian with its lifespan, PostgreSQL keys, the real worker on the simulated device."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
import redis
import websockets
from django.core.management import call_command
from django.test import override_settings
from openai import AsyncOpenAI

from gateway.supervision.platform_processes import SERVER_OPTIONS
from scheduler_engine.policy import PriorityClass
from tenants import selectors, services
from tenants.models import ApiKey, QuotaPolicy
from wire.bus import BusError

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True, slots=True)
class Platform:
    base_url: str
    keys: dict[str, str]
    redis: redis.Redis
    gateway: subprocess.Popen[bytes]

    def client(self, tenant: str = "aurora") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.keys[tenant], max_retries=0)

    async def until_free(self) -> None:
        """No response holds a slot any more."""
        async with asyncio.timeout(5):
            while True:
                if not list(self.redis.scan_iter("rubato:lease:*", _type="zset")):
                    return
                await asyncio.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *command], env=environment, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


async def until_ready(base_url: str, key: str) -> None:
    """The gateway answers and has seen a worker."""
    headers = {"authorization": f"Bearer {key}"}
    request = {"model": MODEL, "messages": HI, "max_tokens": 1}
    async with asyncio.timeout(40), httpx2.AsyncClient(base_url=base_url, headers=headers) as client:
        while True:
            with contextlib.suppress(httpx2.TransportError):
                response = await client.post("/v1/chat/completions", json=request)
                if response.status_code == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
async def platform(service_environment: dict[str, str], project_root: Path) -> Any:
    printed = io.StringIO()
    await asyncio.to_thread(call_command, "seed_demo", json=True, model=[MODEL], stdout=printed)
    keys = json.loads(printed.getvalue())["keys"]
    port = free_port()
    environment = {
        **service_environment,
        "RUBATO_MODEL_PATH": "",
        "PYTHONPATH": f"{project_root}:{project_root}/platform",
    }
    granian = ["granian", *SERVER_OPTIONS, "--host=127.0.0.1", f"--port={port}", "--log-level=warning"]
    worker = ["gpu_worker", "--executor=simulated", "--device-profile=toy"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(worker, environment, project_root))
        gateway = stack.enter_context(running([*granian, "gateway.asgi:application"], environment, project_root))
        client = stack.enter_context(redis.Redis.from_url(service_environment["REDIS_URL"]))
        base_url = f"http://127.0.0.1:{port}"
        await until_ready(base_url, keys["aurora"])
        yield Platform(base_url, keys, client, gateway)


async def test_the_whole_door_serves_refuses_follows_edits_and_leaves_cleanly(platform: Platform) -> None:  # P56
    """One start of all processes, one walk through what only they can show."""
    async with platform.client() as client:
        await _serves_both_doors(client)
        await _refuses_a_large_body(platform)
        await asyncio.to_thread(_refuses_what_is_no_request, platform)
        await _frees_what_a_client_drops(platform, client)
        await _lets_wait_who_may_wait(platform, client)
        await _follows_a_saved_quota(client)
        await _follows_a_quota_that_was_saved_when_redis_did_not_listen(client)
        await _follows_a_revoked_key(client)
    await platform.until_free()
    await _takes_leave_of_whoever_is_served(platform)
    await platform.until_free()
    assert not list(platform.redis.scan_iter("rubato:gateway:*:alive"))


async def _serves_both_doors(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        max_completion_tokens=7,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    async with client.responses.connect() as connection:
        await connection.response.create(model=MODEL, input="Hi", max_output_tokens=5)
        kinds = []
        async for event in connection:
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete", "error"):
                break
    assert kinds.count("response.output_text.delta") == 5


async def _refuses_a_large_body(platform: Platform) -> None:
    headers = {"authorization": f"Bearer {platform.keys['aurora']}"}
    request = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 10_000_000}]}
    async with httpx2.AsyncClient(base_url=platform.base_url, headers=headers) as client:
        response = await client.post("/v1/chat/completions", json=request)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def _refuses_what_is_no_request(platform: Platform) -> None:
    """A socket that is none comes to us; what is no HTTP the server refuses before we see it (docs/api.md)."""
    socket_headers = (
        "Host: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    status, body = _raw(platform, f"GET /v1/realtime HTTP/1.1\r\n{socket_headers}")
    assert (status, json.loads(body)["error"]["code"]) == (404, "route_not_found")
    for request, expected in (
        ("no HTTP at all\r\n\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (f"GET /v1/{'x' * 70_000} HTTP/1.1\r\nHost: here\r\n\r\n", 414),
        ("GET /v1/models HTTP/1.1\r\nHost: here\r\n" + "x: y\r\n" * 200 + "\r\n", 431),
    ):
        assert _raw(platform, request) == (expected, b"")


def _raw(platform: Platform, request: str) -> tuple[int, bytes]:
    """The status and the body of the answer to these very bytes."""
    address = urlsplit(platform.base_url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=5) as connection:
        connection.sendall(request.encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


async def _frees_what_a_client_drops(platform: Platform, client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, max_completion_tokens=2_000, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    await platform.until_free()


async def _lets_wait_who_may_wait(platform: Platform, client: AsyncOpenAI) -> None:
    """P18. One at once: without patience refused at once, with too little in time, with enough served in turn."""
    await asyncio.to_thread(_change, "aurora", PriorityClass.INTERACTIVE, concurrency=1)
    long: dict[str, Any] = {"max_completion_tokens": 2_000, "extra_body": {"ignore_eos": True}}
    async with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=HI, stream=True, **long
    ) as first:
        lines = first.iter_lines()  # kept: one that is thrown away closes its connection
        await anext(lines)
        await _until_refused(client, openai.RateLimitError)
        refusal = await _until_refused(client, openai.InternalServerError, extra_body={"max_queue_wait_ms": 50})
        assert (refusal.status_code, refusal.code) == (503, "queue_timeout")
        assert int(refusal.response.headers["retry-after"]) >= 1
        patient = asyncio.create_task(_ask(client, max_queue_wait_ms=10_000))
        await asyncio.sleep(0.2)
        assert not patient.done()
    assert (await patient).usage.completion_tokens == 1
    await platform.until_free()
    await asyncio.to_thread(_change, "aurora", PriorityClass.INTERACTIVE, concurrency=None)


async def _ask(client: AsyncOpenAI, **body: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=1, extra_body={"ignore_eos": True, **body}
    )


async def _follows_a_saved_quota(client: AsyncOpenAI) -> None:
    await asyncio.to_thread(_change, "aurora", PriorityClass.BATCH, allowed=False)
    await _until_refused(client, openai.PermissionDeniedError, service_tier="flex")


def not_heard(document: Any) -> None:
    """In place of the publisher."""
    raise BusError("Redis is away")


async def _follows_a_quota_that_was_saved_when_redis_did_not_listen(client: AsyncOpenAI) -> None:
    with override_settings(RUBATO_POLICY_PUBLISHER=f"{__name__}.not_heard"):
        await asyncio.to_thread(_change, "aurora", PriorityClass.BATCH, allowed=True)
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(openai.PermissionDeniedError):
                await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1, service_tier="flex")
                return


async def _follows_a_revoked_key(client: AsyncOpenAI) -> None:
    await asyncio.to_thread(_revoke, client.api_key)
    await _until_refused(client, openai.AuthenticationError)


async def _takes_leave_of_whoever_is_served(platform: Platform) -> None:
    """A stream, a plain request and a socket are told; none of them holds the process up."""
    long: dict[str, Any] = {"model": MODEL, "extra_body": {"ignore_eos": True}}
    async with platform.client("nova") as client, client.responses.connect() as socket:
        plain = asyncio.create_task(client.chat.completions.create(messages=HI, max_completion_tokens=2_000, **long))
        stream = await client.chat.completions.create(messages=HI, max_completion_tokens=2_000, stream=True, **long)
        await anext(aiter(stream))
        assert not plain.done()
        signalled_at_s = time.monotonic()
        platform.gateway.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="This gateway is going away"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="This gateway is going away") as refused:
            await plain
        assert refused.value.status_code == 503
        with pytest.raises(websockets.exceptions.ConnectionClosed) as closed:
            await socket.recv_bytes()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert await asyncio.to_thread(platform.gateway.wait, 20) == 0
        assert time.monotonic() - signalled_at_s < 5


async def _until_refused(
    client: AsyncOpenAI, error: type[openai.APIStatusError], **changes: Any
) -> openai.APIStatusError:
    async with asyncio.timeout(10):
        while True:
            try:
                await client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=1, **changes)
            except error as refusal:
                return refusal


def _change(slug: str, priority_class: PriorityClass, **limits: Any) -> None:
    row = QuotaPolicy.objects.get(tenant__slug=slug, priority_class=priority_class.label)
    for name, value in limits.items():
        setattr(row, name, value)
    services.save_quota(actor="test", policy=selectors.tenant_class_policy(row))


def _revoke(key: str) -> None:
    services.revoke_key(actor="test", key_id=ApiKey.objects.get(public_id=key.split("_")[2]).id)
