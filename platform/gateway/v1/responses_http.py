"""/v1/responses over HTTP: create, retrieve, resume, cancel, delete, input items.

Knows statuses and query strings; refuses to know how a response is found and made (``responses``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from gateway import metrics
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1 import asks, generation, responses
from gateway.v1.answers import cost_headers, encode, outcome_of
from gateway.v1.decoding import decode
from gateway.v1.generation import EVENT_STREAM, KEEPALIVE
from gateway.v1.http import Exchange
from gateway.v1.response_events import GRAMMAR_PARAM, Event
from gateway.v1.responses import Reading, reading
from gateway.v1.routes import Call
from gateway.v1.schemas import ResponseCreate
from wire.messages import Finished

CANCELLED_WITHIN_S = 5.0  # how long a cancel waits for the worker's last word
MAX_PAGE, PAGE = 100, 20
_decoder = msgspec.json.Decoder(ResponseCreate)


async def create(call: Call) -> None:
    exchange, runtime = call.exchange, call.runtime
    request = decode(_decoder, await exchange.json_body(runtime.body_limit_bytes))
    source = "sse" if request.stream else "rest"
    found = await responses.create(
        runtime,
        call.caller,
        request,
        source=source,
        received_at_s=exchange.received_at_s,
        is_return=exchange.is_return,
        enter=call.enter,
    )
    exchange.priority_class = found.head.priority_class
    with reading(runtime.door, found):
        if request.stream:
            await _stream(exchange, found, -1)
        elif request.background:
            await exchange.answer(200, encode(found.now()), found.limits.headers())
        else:
            await _whole(exchange, found)


async def retrieve(call: Call) -> None:
    query = call.exchange.query("stream", "starting_after", "include_obfuscation")
    is_stream = _flag(query, "stream")
    starting_after = _integer(query, "starting_after", least=-1, default=-1)
    if "starting_after" in query and not is_stream:
        raise invalid(Reason.INVALID_VALUE, "starting_after needs stream=true.", "starting_after")
    found = await _find(call, to_read=is_stream)
    with reading(call.runtime.door, found):
        if is_stream:
            await _stream(call.exchange, found, starting_after)
        else:
            await call.exchange.answer(200, encode(found.now()))


async def cancel(call: Call) -> None:
    """Answers with the response as it ended, once the worker has said so; a second cancel says the same again."""
    await call.exchange.discard_body()
    found = await _find(call)
    with reading(call.runtime.door, found):
        if found.stream.end is None:
            call.runtime.door.cancel(found.stream)
        try:
            async with asyncio.timeout(CANCELLED_WITHIN_S):
                if found.is_elsewhere:
                    await call.runtime.continuity.until_ended(found.stream)
                response = await found.whole()
        except TimeoutError:
            response = found.now()
        if response is not None and response["status"] in ("completed", "incomplete", "failed"):
            message = f"A response that is {response['status']} cannot be cancelled."
            raise InvalidRequest(Refusal(reason=Reason.NOT_CANCELLABLE, message=message))
        await call.exchange.answer(200, encode(response))


async def delete(call: Call) -> None:
    """Ends it if it still goes on, and shows it to nobody any more."""
    found = await _find(call)
    with reading(call.runtime.door, found):
        if found.stream.end is None:
            call.runtime.door.cancel(found.stream)
        await call.runtime.continuity.forget(call.caller.tenant_id, found.head.response_id)
    body = {"id": found.head.name, "object": "response", "deleted": True}
    await call.exchange.answer(200, encode(body))


async def input_items(call: Call) -> None:
    """What it was asked, newest first unless told otherwise."""
    query = call.exchange.query("limit", "order", "after")
    limit = _integer(query, "limit", least=1, default=PAGE, most=MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(Reason.INVALID_VALUE, "Must be one of asc, desc.", "order")
    found = await _find(call)
    with reading(call.runtime.door, found):
        items = asks.shown_items(found.head.request, found.head.response_id)
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if (after := query.get("after")) is not None:
        if after not in names:
            raise invalid(Reason.INVALID_VALUE, "There is no item of this id in this response.", "after")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    await call.exchange.answer(200, encode(body))


async def _find(call: Call, *, to_read: bool = False) -> Reading:
    return await responses.find(call.runtime, call.caller, call.arguments[0], to_read=to_read)


async def _whole(exchange: Exchange, found: Reading) -> None:
    """A response that never began is an HTTP status; one that broke off is an object that says so."""
    async with exchange.watch_disconnect(found.reader.abandon):
        response = await found.whole()
    if response is None:
        return
    refusal = _refusal(found) if response["status"] == "failed" and not response["output"] else None
    if refusal is not None:
        await exchange.refuse(refusal, found.limits.headers())
        return
    if response["status"] == "failed":
        exchange.tell_failure()
    end = found.stream.end
    waited = cost_headers(end) if isinstance(end, Finished) else {}
    await exchange.answer(200, encode(response), {**found.limits.headers(), **waited})


async def _stream(exchange: Exchange, found: Reading, starting_after: int) -> None:
    """Server-sent events. A refusal before the first token is an HTTP status, as long as nothing has been sent."""
    async with exchange.watch_disconnect(found.reader.abandon):
        with metrics.open_stream("sse"):
            await _EventStream(exchange, found).run(starting_after)


class _EventStream:
    """Always: nothing is sent before the first token, the end, or a silence of KEEPALIVE_S."""

    def __init__(self, exchange: Exchange, found: Reading) -> None:
        self._exchange = exchange
        self._found = found
        self._started = False
        self._held: list[Event] = []  # the preamble, until it is known that there will be an answer

    async def run(self, starting_after: int) -> None:
        arriving = self._found.events(starting_after)
        next_events = asyncio.ensure_future(anext(arriving, None))
        try:
            while True:
                done, _ = await asyncio.wait([next_events], timeout=generation.KEEPALIVE_S)
                if not done:
                    await self._write([], KEEPALIVE)
                    continue
                events = next_events.result()
                if events is None:
                    break
                if not await self._say(events):
                    return
                next_events = asyncio.ensure_future(anext(arriving, None))
        finally:
            next_events.cancel()
        if self._found.stream.end is None:
            return
        await self._write([])
        if _refusal(self._found) is None:
            await self._exchange.end()
        else:
            await self._exchange.break_off(b"")

    async def _say(self, events: list[Event]) -> bool:
        """False when it became a refusal instead of a stream."""
        stream = self._found.stream
        if not self._started and not stream.has_started:
            if stream.end is None:
                self._held += events
                return True
            refusal = _refusal(self._found)
            if refusal is not None:
                await self._exchange.refuse(refusal, self._found.limits.headers())
                return False
        await self._write(events)
        return True

    async def _write(self, events: list[Event], more: bytes = b"") -> None:
        if not self._started:
            self._started = True
            await self._exchange.start(200, {**EVENT_STREAM, **self._found.limits.headers()})
        body = b"".join([server_sent(event) for event in [*self._held, *events]]) + more
        self._held = []
        if body:
            await self._exchange.write(body)


def _refusal(found: Reading) -> Refusal | None:
    """Why there is no answer; None where there is one, or it was taken back."""
    end = found.stream.end
    outcome = None if end is None else outcome_of(end, found.head.priority_class, GRAMMAR_PARAM)
    return outcome if isinstance(outcome, Refusal) and outcome.reason is not Reason.CANCELLED else None


def server_sent(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + encode(event) + b"\n\n"


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid(Reason.INVALID_VALUE, "Must be true or false.", name)
    return value == "true"


def _integer(query: Mapping[str, str], name: str, *, least: int, default: int, most: int = 2**31) -> int:
    text = query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 11 and least <= int(text) <= most):
        raise invalid(Reason.INVALID_VALUE, f"Must be an integer from {least} to {most}.", name)
    return int(text)
