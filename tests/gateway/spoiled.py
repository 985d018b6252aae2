"""Requests that nobody would write, by seed: bodies, queries, headers, uploads, bytes that are no HTTP, and frames.

Every answer has to come in time, must be no failure of ours, and a refusal has the error's shape. A failure names what
was sent. Knows a client and a key; refuses to know which platform stands behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2
import websockets

HANG_S = float(os.environ.get("FUZZ_HANG_S", 30))  # of silence
WHOLE_S = 4 * HANG_S  # for an answer to its end
LANE, ENDS = "the good one", ("response.completed", "response.incomplete", "error")
FIELDS = (
    *("model", "messages", "prompt", "input", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p"),
    *("logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "service_tier", "deadline_ms", "max_queue_wait_ms"),
    *("user", "metadata", "store", "tools", "n", "logprobs", "top_logprobs", "response_format", "max_tokens", "echo"),
    *("text", "background", "instructions", "type", "stream_id", "response_id", "starting_after", "input_file_id"),
    *("completion_deadline_ms", "completion_window", "endpoint", "output_expires_after", "max_output_tokens"),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, 1e-320, "", " ", "\0", "\ud800"),
    *("x" * 5_000, "é" * 300, "\u202e", "auto", "flex", "priority", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}),
    *([{"role": "user", "content": "Hi"}], [{"role": "tool", "content": [{"type": "text", "text": "x"}]}]),
    *({"65": 1}, {"-1": 1}, {"1e9": 200}, {"include_usage": True}, {"type": "json_object"}, [1, 2, 3], [[1], ["a"]]),
    *({"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, {"\0": "\0"}),
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    *("response.create", "response.cancel", "response.resume"),
)
PATHS = (
    *("/v1/responses/{}", "/v1/responses/{}/cancel", "/v1/responses/{}/input_items", "/v1/models/{}", "/v1/{}"),
    *("/v1/responses/{}?stream=true&starting_after={}", "/v1/responses/{}/input_items?limit={}&after={}"),
    *("/v1/files/{}", "/v1/files/{}/content", "/v1/files?limit={}&after={}&purpose={}", "/v1/batches/{}"),
    *("/v1/batches/{}/cancel", "/v1/batches?after={}&limit={}", "/v1/organization/{}", "/V1/{}", "/v1//{}"),
)
WORDS = (
    *("resp_1", "resp_01a22a0e-e3d9-7dbd-bc89-266a6cb15e7a", "file-01a22a0ee3d97dbdbc89266a6cb15e7a", "batch_0"),
    *("%00", "-1", "9" * 40, "é", "a b", "%ff", "%2e%2e%2f", "x" * 3_000, "1", "desc"),
)
HEADERS: tuple[tuple[str, str], ...] = (
    *(("content-type", "text/plain"), ("content-type", "multipart/form-data"), ("content-type", ";;;charset=\xff")),
    *(("content-encoding", "gzip"), ("expect", "100-continue"), ("accept", "text/html"), ("range", "bytes=0-1")),
    *(("idempotency-key", "k"), ("idempotency-key", "x" * 300), ("idempotency-key", "\xe9"), ("x-request-id", "'\">")),
    *(("authorization", "Basic eDp5"), ("authorization", "Bearer"), ("authorization", "Bearer sk_demo_0_\xff")),
    *(("traceparent", "00-zz-zz-01"), ("x-stainless-retry-count", "-9" * 50), ("cookie", "sessionid=\xff")),
)
NO_HTTP = (
    *(b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n"),
    b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/files HTTP/1.1\r\nHost:x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(500)) + b"\r\n",
    b"GET /v1/" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
)
BOUNDARY = "seam"
LINES = (
    *(b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}\n', b"{}\n", b"\xff\xfe\n", b"\0\n"),
    *(b"[" * 5_000 + b"\n", b'{"custom_id":"a"}\n' * 3, b"", b"\n\n\n"),
)


@dataclass(slots=True)
class Fuzz:
    """Always: ``outcomes`` counts what has been sent, each by how it was answered."""

    client: httpx2.AsyncClient
    key: str
    model: str
    outcomes: Counter[str] = field(default_factory=Counter)

    async def one(self, seed: int) -> None:
        """One request, upload, piece of noise or socket, the same for the same seed."""
        chance = random.Random(seed)
        (kind,) = chance.choices(
            (self._body, self._path, self._upload, self._noise, self._leave, self._socket), (45, 18, 4, 5, 5, 23)
        )
        with contextlib.suppress(UnicodeEncodeError, httpx2.InvalidURL):  # the client itself would not send it
            await kind(chance)

    def good(self) -> dict[str, dict[str, Any]]:
        """A body that is served, for each way to ask; the last makes a batch of a file that is not there."""
        shared = {"model": self.model}
        batch = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return {
            "/v1/chat/completions": {**shared, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
            "/v1/completions": {**shared, "prompt": "Hi", "max_tokens": 3},
            "/v1/responses": {**shared, "input": "Hi", "max_output_tokens": 3},
            "/v1/batches": batch,
        }

    async def _body(self, chance: random.Random) -> None:
        path, body = chance.choice(list(self.good().items()))
        await self._ask("POST", path, spoiled(chance, body), _headers(chance))

    async def _path(self, chance: random.Random) -> None:
        path = chance.choice(PATHS).format(*(chance.choice(WORDS) for _ in range(3)))
        await self._ask(chance.choice(("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS")), path, b"", _headers(chance))

    async def _upload(self, chance: random.Random) -> None:
        """A form as it should be, or with a part missing, doubled or cut; a file that was kept is deleted again."""
        parts = [_part("purpose", chance.choice((b"batch", b"batch", b"evals", b"\xff")))]
        parts.append(_part("file", b"".join(chance.choices(LINES, k=3)), "".join(chance.choices('a"\0;\\/é', k=3))))
        if chance.random() < 0.3:
            parts.append(_part(chance.choice(("expires_after[seconds]", "purpose", "file", "x" * 999)), b"-1"))
        chance.shuffle(parts)
        form = b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
        if chance.random() < 0.3:
            form = form[: chance.randrange(len(form))]
        found = await self._ask(
            "POST", "/v1/files", form, {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        )
        if found.status_code == 200:
            name = found.json()["id"]
            made = {**self.good()["/v1/batches"], "input_file_id": name}
            await self._ask("POST", "/v1/batches", json.dumps(made).encode(), {})
            await self._ask("DELETE", f"/v1/files/{name}", b"", {})

    async def _noise(self, chance: random.Random) -> None:
        """Bytes that are no HTTP: the line is answered or closed, in time, and never with a server error."""
        sent, where = chance.choice(NO_HTTP), self.client.base_url
        if chance.random() < 0.3:
            sent = chance.randbytes(chance.randint(1, 2_000)) + b"\r\n\r\n"
        reader, writer = await asyncio.open_connection(where.host, where.port)
        try:
            writer.write(sent)
            async with asyncio.timeout(HANG_S):
                head = await reader.read(64)
        except ConnectionError:
            head = b""
        finally:
            writer.close()
        assert not head.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")), (sent, head)
        self.outcomes["noise, answered" if head else "noise, closed"] += 1

    async def _leave(self, chance: random.Random) -> None:
        """Asks for a stream, and hangs up after so long."""
        path = chance.choice(("/v1/chat/completions", "/v1/completions", "/v1/responses"))
        body = {**self.good()[path], "stream": True, "max_output_tokens" if "resp" in path else "max_tokens": 300}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random()):
                await self._ask("POST", path, json.dumps({**body, "ignore_eos": True}).encode(), {})
        self.outcomes["left"] += 1

    async def _ask(self, method: str, path: str, content: bytes, headers: dict[str, str]) -> httpx2.Response:
        own = {"authorization": f"Bearer {self.key}", "content-type": "application/json", **headers}
        sent = (method, path, content[:2_000], headers)
        raw = {name: value.encode("latin-1") for name, value in own.items()}
        async with asyncio.timeout(WHOLE_S):
            try:
                answer = await self.client.request(method, path, content=content, headers=raw, timeout=HANG_S)
            except httpx2.TransportError as error:
                raise AssertionError(sent) from error
        self.outcomes[f"http {answer.status_code}"] += 1
        assert answer.status_code not in (500, 502, 504), (sent, answer.text)
        assert "text/html" not in answer.headers.get("content-type", ""), (sent, answer.text)
        if answer.status_code >= 400 and method != "HEAD":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (sent, answer.text)
        return answer

    async def _socket(self, chance: random.Random) -> None:
        """Some frames, then a good one in a lane of its own, which is served unless the socket was closed for a reason.

        One in ten hangs up in the midst of it instead.
        """
        url = str(self.client.base_url).replace("http", "ws", 1).rstrip("/") + "/v1/responses"
        good = {"type": "response.create", **self.good()["/v1/responses"]}
        sent = [spoiled(chance, good) for _ in range(chance.randint(1, 6))]
        closed = None
        headers = {"Authorization": f"Bearer {self.key}"}
        async with websockets.connect(url, additional_headers=headers, max_size=None) as connection:
            try:
                for frame in sent:
                    await connection.send(_as_frame(chance, frame))
                await connection.send(json.dumps({**good, "stream_id": LANE}))
                if chance.random() < 0.1:
                    connection.transport.abort()
                    self.outcomes["socket left"] += 1
                    return
                async with asyncio.timeout(HANG_S):
                    await _until_served(connection, sent)
            except websockets.ConnectionClosed as error:
                closed = error
        assert closed is None or (closed.rcvd is not None and closed.rcvd.code != 1011), (sent, closed)
        self.outcomes["socket served" if closed is None else f"socket closed {closed.rcvd.code}"] += 1


async def _until_served(connection: Any, sent: list[bytes]) -> None:
    while True:
        event = json.loads(await connection.recv())
        assert event.get("status") not in (500, 502), (sent, event)
        if event.get("stream_id") == LANE and event["type"] in ENDS:
            return


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


def _as_frame(chance: random.Random, frame: bytes) -> Any:
    """As text, as bytes, or as text in two fragments."""
    kind = chance.random()
    if kind < 0.1:
        middle = len(frame) // 2
        return [frame[:middle].decode("utf-8", "replace"), frame[middle:].decode("utf-8", "replace")]
    return frame if kind < 0.3 else frame.decode("utf-8", "replace")


def _headers(chance: random.Random) -> dict[str, str]:
    return dict([chance.choice(HEADERS)]) if chance.random() < 0.15 else {}


def _part(name: str, content: bytes, filename: str | None = None) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
    head += "" if filename is None else f'; filename="{filename}"'
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"
