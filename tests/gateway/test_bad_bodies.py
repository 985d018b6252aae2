"""Bodies that are broken, too large or of another kind are refused in the OpenAI error shape, and cost nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from gateway import v1
from tests.gateway.bad_requests import CHAT, assert_refused, body, send


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  ",
        b"[]",
        b'"Hi"',
        b"null",
        b"{",
        body() + b"x",
        body(temperature=...)[:-1] + b',"temperature":NaN}',
        body()[:-1] + b',"temperature":Infinity}',
        b'{"model":"\xff"}',
        b'{"messages":' + b"[" * 100_000,
        body()[:-1] + b',"tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=[
        *("empty", "blank", "array", "string", "null", "cut", "trailing", "NaN", "Infinity"),
        *("not UTF-8", "deep and cut", "deep"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400(world: Any, content: bytes) -> None:
    response = await send(world, content)
    assert response.status_code == 400
    assert_refused(world, response, 400, response.json()["error"]["code"], response.json()["error"]["param"])


async def received_without_a_whole_body(world: Any, key: str) -> list[dict[str, Any]]:
    """What is sent when the server says ``http.disconnect`` amid the body, as it does for bad chunks."""
    messages = iter([{"type": "http.request", "body": b'{"mod', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    await v1.application(world.runtime, scope, receive, keep)
    return sent


async def test_a_body_that_breaks_off_is_400_in_the_error_shape(world: Any) -> None:
    start, end = await received_without_a_whole_body(world, world.keys["aurora"])
    assert start["status"] == 400
    assert json.loads(end["body"])["error"]["code"] == "invalid_request"
    assert world.worker.submits == []


async def test_a_broken_body_does_not_hide_an_earlier_refusal(world: Any) -> None:
    start, *parts = await received_without_a_whole_body(world, "nonsense")
    assert start["status"] == 401
    assert json.loads(b"".join(part["body"] for part in parts))["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("size", [1_048_577, 10_000_000])
async def test_a_body_over_the_limit_is_413(world: Any, size: int) -> None:
    content = body(messages=[{"role": "user", "content": "x" * size}])
    assert_refused(world, await send(world, content), 413, "request_too_large")


async def test_a_body_over_the_limit_that_does_not_announce_its_size_is_413_too(world: Any) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 65_536

    headers = {"authorization": f"Bearer {world.keys['aurora']}", "content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        response = await client.post(CHAT, content=pieces(), headers=headers)
    assert_refused(world, response, 413, "request_too_large")


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("size", [1_048_577, 99_999_999])
async def test_a_body_that_is_announced_too_large_is_413_at_once_and_before_it_is_sent(
    world: Any, size: int, expects: bytes
) -> None:
    host, port = world.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key, length = world.keys["aurora"].encode(), str(size).encode()
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n"
    writer.write(head + b"content-type: application/json\r\ncontent-length: " + length + b"\r\n" + expects + b"\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 2.0)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer
    writer.close()


@pytest.mark.parametrize(
    "headers", [{"content_type": "text/plain"}, {"content_type": "multipart/form-data"}, {"content_encoding": "gzip"}]
)
async def test_another_media_type_is_415(world: Any, headers: dict[str, str]) -> None:
    assert_refused(world, await send(world, body(), **headers), 415, "unsupported_media_type")


CHARSETS = ["latin1", "utf-16", "UTF-7", '"iso-8859-1"', "nonsense", ""]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("charset", CHARSETS)
async def test_a_body_in_another_charset_is_refused_unread(world: Any, path: str, charset: str) -> None:
    """Broken by its length and no JSON: whoever read of it would say so."""
    answer = await send(world, b"\xe9" * 2_000_000, path=path, content_type=f"application/json; charset={charset}")
    assert_refused(world, answer, 415, "unsupported_media_type")


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "utf8", '"Utf-8"'])
async def test_utf_8_may_be_said_as_one_likes(world: Any, charset: str) -> None:
    for content_type in (f"application/json;charset={charset}", f"Application/JSON ; a=b; charset={charset}", ""):
        assert (await send(world, body(), content_type=content_type)).status_code == 200
