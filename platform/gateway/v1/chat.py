"""POST /v1/chat/completions, whole and as server-sent events.

Knows the OpenAI chat shapes; refuses to know limits and workers. A stream's event numbers are a function of the token
index alone: one preamble chunk, one chunk per token (with empty text while a character is not complete), a tail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway import metrics
from gateway.admission import Denied
from gateway.asking import Ask
from gateway.auth import Caller
from gateway.door import Door, Entered
from gateway.errors import Reason, Refusal, error_event, from_reject, invalid
from gateway.streams import Delivery, End, Lost
from gateway.text import Detokenizer
from gateway.v1 import asks, schemas
from gateway.v1.decoding import decode, refuse_unsupported
from gateway.v1.http import Exchange
from scheduler_engine.events import FinishReason
from wire.messages import Finished, Rejected

KEEPALIVE_S = 10.0  # a waiting stream begins after this long, then sends a comment as often: no proxy cuts it
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_decoder = msgspec.json.Decoder(schemas.ChatRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Rendering:
    """The parts of an answer that stay the same in all its chunks."""

    entered: Entered
    created: int
    include_usage: bool

    def envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.entered.response_id}",
            "object": kind,
            "created": self.created,
            "model": self.entered.text.model,
            "service_tier": self.entered.service_tier,
            "system_fingerprint": None,
        }

    def chunk(self, delta: Mapping[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.include_usage else {}
        return _event({**self.envelope("chat.completion.chunk"), "choices": [choice], **usage})

    def usage_chunk(self, finished: Finished) -> bytes:
        envelope = self.envelope("chat.completion.chunk")
        return _event({**envelope, "choices": [], "usage": usage(finished, self.entered.max_tokens)})


class DeltaTemplate:
    """A content chunk with a hole for the text: rendering one token is then one small JSON string."""

    def __init__(self, rendering: _Rendering) -> None:
        self._head, self._tail = rendering.chunk({"content": "\0"}).split(_encode("\0"))

    def render(self, texts: list[str]) -> bytes:
        return b"".join([self._head + _encode(text) + self._tail for text in texts])


async def handle(exchange: Exchange, door: Door, caller: Caller, body: bytes) -> None:
    received_at_s = time.monotonic()
    request = decode(_decoder, body)
    ask = _ask(request, door, received_at_s)
    entered = await door.enter(caller, ask)
    if isinstance(entered, Denied):
        exchange.priority_class = entered.limits.priority_class
        await exchange.refuse(entered.refusal, entered.limits.headers())
        return
    exchange.priority_class = entered.priority_class
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    rendering = _Rendering(entered, int(time.time()), include_usage)
    try:
        async with exchange.watch_disconnect(entered.stream.abandon):
            if request.stream:
                with metrics.open_stream("sse"):
                    await _Stream(exchange, rendering).run()
            else:
                await _whole(exchange, rendering)
    finally:
        door.leave(entered)


def _ask(request: schemas.ChatRequest, door: Door, received_at_s: float) -> Ask:
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid(Reason.INVALID_VALUE, "stream_options needs stream=true.", "stream_options")
    max_tokens, max_tokens_param = asks.chat_max_tokens(request)
    text = door.texts.get(request.model)
    return asks.ask(
        request,
        model=request.model,
        messages=asks.chat_messages(request),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        source="sse" if request.stream else "rest",
        received_at_s=received_at_s,
        vocabulary_size=text.vocabulary_size if text else None,
    )


async def _whole(exchange: Exchange, rendering: _Rendering) -> None:
    entered = rendering.entered
    detokenizer, parts = Detokenizer(entered.text), []
    while True:
        delivery = await entered.stream.next()
        parts += detokenizer.feed(delivery.token_ids, visible_bytes(delivery.end))
        if delivery.end is not None:
            break
        if entered.stream.abandoned_at_s is not None:
            return
    outcome = outcome_of(delivery.end, entered)
    if isinstance(outcome, Refusal):
        await exchange.refuse(outcome, entered.limits.headers())
        return
    finished, finish_reason = outcome
    message = {"role": "assistant", "content": "".join(parts), "refusal": None}
    answer = {
        **rendering.envelope("chat.completion"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
        "usage": usage(finished, entered.max_tokens),
    }
    await exchange.answer(200, _encode(answer), {**entered.limits.headers(), **_cost_headers(finished)})


class _Stream:
    """One SSE answer. Always: a refusal is an HTTP status before the first byte, and an error event after it."""

    def __init__(self, exchange: Exchange, rendering: _Rendering) -> None:
        self._exchange = exchange
        self._rendering = rendering
        self._entered = rendering.entered
        self._detokenizer = Detokenizer(rendering.entered.text)
        self._delta = DeltaTemplate(rendering)
        self._started = False

    async def run(self) -> None:
        stream = self._entered.stream
        while True:
            delivery = await self._next()
            if delivery is None:
                await self._write(b": waiting\n\n")
                continue
            if stream.abandoned_at_s is not None and delivery.end is None:
                return
            texts = self._detokenizer.feed(delivery.token_ids, visible_bytes(delivery.end))
            if delivery.end is not None:
                await self._finish(delivery.end, texts)
                return
            await self._write(self._delta.render(texts))

    async def _next(self) -> Delivery | None:
        """None when nothing has come for as long as a proxy may be silent."""
        stream = self._entered.stream
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                return await stream.next()
        except TimeoutError:
            return None

    async def _write(self, events: bytes) -> None:
        await self._exchange.write(await self._start() + events)

    async def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        await self._exchange.start(200, {**EVENT_STREAM, **self._entered.limits.headers()})
        return self._rendering.chunk({"role": "assistant", "content": ""})

    async def _finish(self, end: End, texts: list[str]) -> None:
        outcome = outcome_of(end, self._entered)
        if isinstance(outcome, Refusal):
            await self._refuse(outcome, texts)
            return
        finished, finish_reason = outcome
        tail = self._delta.render(texts) + self._rendering.chunk({}, finish_reason)
        if self._rendering.include_usage:
            tail += self._rendering.usage_chunk(finished)
        await self._exchange.end(await self._start() + tail + b"data: [DONE]\n\n")

    async def _refuse(self, refusal: Refusal, texts: list[str]) -> None:
        if not self._started and not texts:
            await self._exchange.refuse(refusal, self._entered.limits.headers())
            return
        await self._exchange.end(await self._start() + self._delta.render(texts) + _event(error_event(refusal)))


def outcome_of(end: End, entered: Entered) -> tuple[Finished, str] | Refusal:
    """The worker's end with OpenAI's finish reason, or why there is none."""
    if isinstance(end, Rejected):
        return from_reject(end.reason, entered.priority_class, end.retry_after_us)
    if isinstance(end, Lost):
        return end.refusal
    choice = end.choices[0]
    match choice.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return end, choice.reason
        case FinishReason.SHED:
            return from_reject(choice.detail, entered.priority_class, None)
        case FinishReason.CANCELLED:
            return Refusal(reason=Reason.CANCELLED, message="The response was cancelled.")
        case _:
            return Refusal(reason=Reason.FAILED, message="The model could not compute this response.")


def visible_bytes(end: End | None) -> int | None:
    """Where a stop string cut the text."""
    return end.choices[0].visible_bytes if isinstance(end, Finished) else None


def usage(finished: Finished, max_tokens: int) -> dict[str, Any]:
    """The worker's count, the only count there is. ``max_tokens`` is the number that was reserved."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.output_tokens,
        "total_tokens": finished.prompt_tokens + finished.output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, "max_tokens": max_tokens},
    }


def _cost_headers(finished: Finished) -> dict[str, str]:
    counters = finished.counters
    return {
        "x-queue-ms": str(counters.queue_us // 1_000),
        "openai-processing-ms": str(counters.total_us // 1_000),
    }


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
