"""Idempotency-Key: the same key and body are worked on once for a day, and answered the same.

Knows keys, digests and kept answers; refuses to know what is answered. A request with a key runs to its end even when
its client has gone: the client will come again for the answer. A refused or broken one does not occupy its key.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1.http import Answer
from gateway.v1.routes import Call, Handler
from wire.bus import BusError
from wire.redis_bus import bus_errors

HEADER = b"idempotency-key"
REPLAYED = {"idempotent-replayed": "true"}
KEPT_MS = 86_400_000
LEASE_MS = 15_000  # of a running twin: one that died with its gateway frees its key after this
MAX_KEY = 255
_SCRIPT = Path(__file__).with_name("idempotency.lua").read_text(encoding="utf-8")
_headers_decoder = msgspec.json.Decoder(dict[str, str])


def once(handler: Handler) -> Handler:
    """The handler, worked on once for each Idempotency-Key; without the header, the handler itself."""

    async def create(call: Call) -> None:
        keys = call.exchange.header_values(HEADER)
        if not keys:
            await handler(call)
            return
        key = keys[0]
        if len(keys) > 1 or not 1 <= len(key) <= MAX_KEY or not (key.isascii() and key.isprintable()):
            words = f"A request has one Idempotency-Key, of 1 to {MAX_KEY} printable ASCII characters."
            raise invalid(Reason.INVALID_VALUE, words, "Idempotency-Key")
        body = await call.exchange.json_body(call.runtime.body_limit_bytes)
        shelf = Shelf(call.runtime.redis, call.runtime.redis_keys.idempotency(call.caller.tenant_id, _digest(key)))
        await _answer_once(call, handler, shelf, _digest(f"{call.exchange.path}\n", body))

    return create


async def _answer_once(call: Call, handler: Handler, shelf: Shelf, request: str) -> None:
    kept = await shelf.claim(request)
    if kept is not None:
        await call.exchange.replay(kept, REPLAYED)
        return
    answer = call.exchange.keep_answer()
    try:
        async with shelf.renewed():
            await handler(call)
    finally:
        if answer.is_good:
            await shelf.complete(answer)
        else:
            await shelf.release()


class Shelf:
    """The place of one key. Always: it holds one whole good answer, or belongs to one who is at work on it."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._name = name
        self._me = uuid.uuid4().hex
        self._script = redis.register_script(_SCRIPT)

    async def claim(self, request: str) -> Answer | None:
        """The answer that was given; None when the work is ours to do. Raises InvalidRequest and BusError."""
        reply = await self._run("claim", request, LEASE_MS)
        match reply[0]:
            case b"mine":
                return None
            case b"other":
                words = "This Idempotency-Key was used with another request."
                raise InvalidRequest(Refusal(reason=Reason.KEY_REUSED, message=words, param="Idempotency-Key"))
            case b"running":
                words = "A request with this Idempotency-Key is under way; its answer can be had soon."
                raise InvalidRequest(Refusal(reason=Reason.TWIN_RUNNING, message=words, param="Idempotency-Key"))
            case _:
                _, status, headers, body = reply
                return Answer(int(status), _headers_decoder.decode(headers), [zlib.decompress(body)], is_whole=True)

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Ours for as long as the block lasts."""
        task = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_MS / 3_000)
            with suppress(BusError):  # the next one may pass
                await self._run("renew", LEASE_MS)

    async def complete(self, answer: Answer) -> None:
        body = zlib.compress(b"".join(answer.parts), 1)
        await self._run("complete", answer.status, msgspec.json.encode(answer.headers), body, KEPT_MS)

    async def release(self) -> None:
        await self._run("release")

    async def _run(self, verb: str, *arguments: str | int | bytes) -> list[bytes]:
        with bus_errors():
            reply: list[bytes] = await self._script(keys=[self._name], args=[verb, self._me, *arguments])
        return reply


def _digest(text: str, body: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + body).hexdigest()
