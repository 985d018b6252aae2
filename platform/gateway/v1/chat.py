"""POST /v1/chat/completions, whole and as server-sent events.

Knows the OpenAI chat shapes; refuses to know limits and workers. A stream's event numbers are a function of the token
index alone: one preamble chunk for each choice, one chunk per token (with empty text while a character is not
complete), a chunk for each choice's end, a tail.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.asking import Ask, Chat
from gateway.door import Door
from gateway.errors import Reason, invalid
from gateway.response_stream import Piece
from gateway.v1 import asks, generation, schemas
from gateway.v1.answers import ChoiceText, chat_logprobs, encode, event, usage
from gateway.v1.decoding import decode, refuse_unsupported
from gateway.v1.generation import Group
from gateway.v1.routes import Call
from wire.messages import Finished

_decoder = msgspec.json.Decoder(schemas.ChatRequest)


async def create(call: Call) -> None:
    """From a body to its answer. Raises InvalidRequest."""
    exchange, door = call.exchange, call.runtime.door
    request = decode(_decoder, await exchange.json_body(call.runtime.body_limit_bytes))
    stream = bool(request.stream)
    ask = ask_of(request, door, exchange.received_at_s, source="sse" if stream else "rest")
    wanted = [replace(ask, is_return=exchange.is_return)]
    async with generation.entered(door, call.enter, call.caller, wanted) as group:
        await generation.respond(exchange, group, frames_of(request, group), stream=stream)


def ask_of(request: schemas.ChatRequest, door: Door, received_at_s: float, *, source: str) -> Ask:
    """Raises InvalidRequest."""
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid(Reason.INVALID_VALUE, "stream_options needs stream=true.", "stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid(Reason.INVALID_VALUE, "top_logprobs needs logprobs=true.", "top_logprobs")
    max_tokens, max_tokens_param = asks.chat_max_tokens(request)
    return asks.ask(
        request,
        model=request.model,
        prompt=Chat(asks.chat_messages(request)),
        prompt_param="messages",
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        source=source,
        received_at_s=received_at_s,
        text=door.texts.get(request.model),
        num_choices=request.n or 1,
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=asks.grammar_of(request.response_format),
    )


def frames_of(request: schemas.ChatRequest, group: Group) -> ChatFrames:
    options = request.stream_options
    rendering = _Rendering(group, int(time.time()), bool(options and options.include_usage))
    return ChatFrames(rendering, request.n or 1, with_logprobs=bool(request.logprobs))


@dataclass(frozen=True, slots=True)
class _Rendering:
    """The parts of an answer that stay the same in all its chunks."""

    group: Group
    created: int
    include_usage: bool

    def envelope(self, kind: str) -> dict[str, Any]:
        (entered,) = self.group.entered
        return {
            "id": f"chatcmpl-{entered.response_id}",
            "object": kind,
            "created": self.created,
            "model": entered.text.model,
            "service_tier": entered.service_tier,
            "system_fingerprint": None,
        }

    def chunk(
        self, index: int, delta: Mapping[str, str], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self.include_usage else {}
        return event({**self.envelope("chat.completion.chunk"), "choices": [choice], **usage})


class DeltaTemplate:
    """A content chunk with a hole for the text: rendering one token is then one small JSON string."""

    def __init__(self, rendering: _Rendering, index: int) -> None:
        self._head, self._tail = rendering.chunk(index, {"content": "\0"}).split(encode("\0"))

    def render(self, texts: list[str]) -> bytes:
        return b"".join([self._head + encode(text) + self._tail for text in texts])


class ChatFrames:
    """Always: each choice has one chunk with a role first, and one with a finish reason last."""

    def __init__(self, rendering: _Rendering, num_choices: int, *, with_logprobs: bool) -> None:
        self._rendering = rendering
        self._entered = rendering.group.entered[0]
        text = self._entered.text
        self._texts = [ChoiceText.of(text) for _ in range(num_choices)]
        self._templates: dict[int, DeltaTemplate] = {}  # of choices that have been streamed
        self._logprobs: list[list[Any]] | None = [[] for _ in range(num_choices)] if with_logprobs else None

    def preamble(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join([self._rendering.chunk(index, first) for index in range(len(self._texts))])

    def piece(self, number: int, piece: Piece) -> bytes:
        choice = self._texts[piece.choice]
        shown = choice.feed(piece)
        if self._logprobs is None:
            chunks = self._template(piece.choice).render(shown)
        else:
            chunks = self._with_logprobs(piece, shown)
        if piece.end is not None and piece.end.reason in ("stop", "length"):
            chunks += self._rendering.chunk(piece.choice, {}, piece.end.reason)
        return chunks

    def _template(self, index: int) -> DeltaTemplate:
        if index not in self._templates:
            self._templates[index] = DeltaTemplate(self._rendering, index)
        return self._templates[index]

    def keep(self, number: int, piece: Piece) -> None:
        self._texts[piece.choice].feed(piece)
        if self._logprobs is not None:
            self._logprobs[piece.choice] += chat_logprobs(self._entered.text, piece.logprobs)["content"]

    def _with_logprobs(self, piece: Piece, shown: list[str]) -> bytes:
        chunks = []
        for text, one in zip(shown, piece.logprobs, strict=True):
            found = chat_logprobs(self._entered.text, [one])
            chunks.append(self._rendering.chunk(piece.choice, {"content": text}, logprobs=found))
        return b"".join(chunks)

    def tail(self, finished: Sequence[Finished]) -> bytes:
        if not self._rendering.include_usage:
            return b""
        envelope = self._rendering.envelope("chat.completion.chunk")
        return event({**envelope, "choices": [], "usage": usage(finished, self._entered.max_tokens)})

    def whole(self, finished: Sequence[Finished]) -> bytes:
        ends = finished[0].choices
        answer = {
            **self._rendering.envelope("chat.completion"),
            "choices": [self._choice(index, ends[index].reason) for index in range(len(self._texts))],
            "usage": usage(finished, self._entered.max_tokens),
        }
        return encode(answer)

    def _choice(self, index: int, finish_reason: str) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else {"content": self._logprobs[index], "refusal": None}
        message = {"role": "assistant", "content": "".join(self._texts[index].parts), "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
