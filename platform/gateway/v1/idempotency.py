"""Idempotency-Key: the same key and body are worked on once for a day, and answered the same.

Knows keys, digests and kept answers; refuses to know what is answered (``once``). A request with a key runs to its end
even when its client has gone: the client will come again for the answer. A refused or broken one does not occupy its
key, once what it began has ended at no charge.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from gateway.admission import new_response_id
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1.http import Answer
from gateway.v1.once import TWIN_RUNNING, Once
from gateway.v1.routes import Call, Handler
from wire.bus import BusError
from wire.redis_bus import bus_errors

HEADER = b"idempotency-key"
REPLAYED = {"idempotent-replayed": "true"}
KEPT_MS = 86_400_000
LEASE_MS = 15_000  # of a running twin: of one that is silent for longer others ask what became of its operation
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
    runtime = call.runtime
    held = await shelf.claim(request, new_response_id(runtime.admission.now_ms(), os.urandom(10)))
    if isinstance(held, Answer):
        await call.exchange.replay(held, REPLAYED)
        return
    answer = call.exchange.keep_answer()
    once = Once(runtime.door, runtime.policy, runtime.fates, held.operation, is_left=held.is_left)
    call.exchange.operation_id = held.operation
    try:
        async with shelf.renewed():
            await handler(replace(call, once=once))
    finally:
        if answer.is_good:
            await shelf.complete(request, held.operation, answer)
        elif not once.is_spent:
            await shelf.release([runtime.redis_keys.response(name) for name in once.begun], is_left=held.is_left)


@dataclass(frozen=True, slots=True)
class Claim:
    """The work is ours to do, as this operation. ``is_left``: one who was at it is not heard of any more."""

    operation: str
    is_left: bool


class Shelf:
    """The place of one key. Always: it holds one whole good answer, or the operation that will have it."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._name = name
        self._me = uuid.uuid4().hex
        self._script = redis.register_script(_SCRIPT)

    async def claim(self, request: str, operation: str) -> Answer | Claim:
        """The answer that was given; or the work, as ``operation`` where nobody has begun it. Raises InvalidRequest
        and BusError.
        """
        reply = await self._run("claim", request, operation, LEASE_MS, KEPT_MS)
        match reply[0]:
            case b"mine" | b"left":
                return Claim(reply[1].decode(), is_left=reply[0] == b"left")
            case b"other":
                words = "This Idempotency-Key was used with another request."
                raise InvalidRequest(Refusal(reason=Reason.KEY_REUSED, message=words, param="Idempotency-Key"))
            case b"running":
                raise InvalidRequest(TWIN_RUNNING)
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

    async def complete(self, request: str, operation: str, answer: Answer) -> None:
        """Also where the lease has run out, or another has taken it to the same operation."""
        headers, body = msgspec.json.encode(answer.headers), zlib.compress(b"".join(answer.parts), 1)
        await self._run("complete", request, operation, answer.status, headers, body, KEPT_MS)

    async def release(self, records: Sequence[str], *, is_left: bool) -> None:
        """There is no answer to keep. Where one of ``records`` goes on, or was charged, who comes next asks for it;
        also where another was at work on it before (``is_left``), who may have let in what nobody asked for since.
        """
        await self._run("release", int(is_left), records=records)

    async def _run(self, verb: str, *arguments: str | int | bytes, records: Sequence[str] = ()) -> list[bytes]:
        with bus_errors():
            reply: list[bytes] = await self._script(keys=[self._name, *records], args=[verb, self._me, *arguments])
        return reply


def _digest(text: str, body: bytes = b"") -> str:
    return hashlib.sha256(text.encode() + body).hexdigest()
