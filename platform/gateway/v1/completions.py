"""POST /v1/completions: texts and token ids to go on with, without a template; one response for each prompt.

Knows OpenAI's text_completion shapes; refuses to know limits and workers. A choice's index is the number of its prompt
times n, plus its own number; a list of prompts is let in as a whole or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gateway.asking import Ask, Plain, Prompt, TokenIds
from gateway.door import Door, Entered
from gateway.errors import Reason, invalid
from gateway.response_stream import Piece
from gateway.text import Detokenizer
from gateway.v1 import asks, generation, schemas
from gateway.v1.answers import LEAST_LOGPROB, ChoiceText, encode, event, token_text, usage
from gateway.v1.decoding import decode, refuse_unsupported
from gateway.v1.generation import Group
from gateway.v1.routes import Call
from wire.messages import Finished, TokenLogprob

_decoder = msgspec.json.Decoder(schemas.CompletionRequest)


async def create(call: Call) -> None:
    """From a body to its answer. Raises InvalidRequest."""
    exchange, door = call.exchange, call.runtime.door
    request = decode(_decoder, await exchange.json_body(call.runtime.body_limit_bytes))
    stream = bool(request.stream)
    found = asks_of(request, door, exchange.received_at_s, source="sse" if stream else "rest")
    found = [replace(ask, is_return=exchange.is_return) for ask in found]
    async with generation.entered(door, call.enter, call.caller, found) as group:
        await generation.respond(exchange, group, CompletionFrames(request, group), stream=stream)


def asks_of(request: schemas.CompletionRequest, door: Door, received_at_s: float, *, source: str) -> list[Ask]:
    """One for each prompt. Raises InvalidRequest."""
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise invalid(Reason.INVALID_VALUE, "stream_options needs stream=true.", "stream_options")
    if request.echo and request.logprobs is not None:
        words = "'logprobs' is not supported here together with 'echo': the prompt's own are not computed."
        raise invalid(Reason.UNSUPPORTED_PARAMETER, words, "logprobs")
    text = door.texts.get(request.model)
    return [
        asks.ask(
            request,
            model=request.model,
            prompt=prompt,
            prompt_param="prompt",
            max_tokens=request.max_tokens,
            max_tokens_param="max_tokens",
            source=source,
            received_at_s=received_at_s,
            text=text,
            num_choices=request.n or 1,
            num_top_logprobs=request.logprobs,
        )
        for prompt in prompts_of(request.prompt)
    ]


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """A text, token ids, or a list of either. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [Plain(prompt)]
    if not prompt:
        raise invalid(Reason.INVALID_VALUE, "The list of prompts is empty.", "prompt")
    token_ids = tuple(one for one in prompt if isinstance(one, int))
    if len(token_ids) == len(prompt):
        return [TokenIds(token_ids)]
    if token_ids:
        raise invalid(Reason.INVALID_TYPE, "Token ids and prompts cannot be mixed in one list.", "prompt")
    if len(prompt) > schemas.MAX_PROMPTS:
        raise invalid(Reason.INVALID_VALUE, f"At most {schemas.MAX_PROMPTS} prompts at once.", "prompt")
    return [Plain(one) if isinstance(one, str) else TokenIds(tuple(one)) for one in prompt if not isinstance(one, int)]


class _Logprobs:
    """OpenAI's columns for one choice. Always: offsets count the characters shown before a token."""

    def __init__(self, with_top: bool) -> None:
        self._with_top = with_top
        self._offset = 0
        self._rows: list[tuple[str, float, dict[str, float], int]] = []

    def take(self, choice: ChoiceText, shown: str, one: TokenLogprob | None) -> dict[str, Any] | None:
        if one is None:
            return None
        top = {token_text(choice.text, token_id): _finite(logprob) for token_id, logprob in one.top}
        row = (token_text(choice.text, one.token_id), _finite(one.logprob), top, self._offset)
        self._rows.append(row)
        self._offset += len(shown)
        return self._columns([row])

    def whole(self) -> dict[str, Any]:
        return self._columns(self._rows)

    def _columns(self, rows: Sequence[tuple[str, float, dict[str, float], int]]) -> dict[str, Any]:
        return {
            "tokens": [row[0] for row in rows],
            "token_logprobs": [row[1] for row in rows],
            "top_logprobs": [row[2] for row in rows] if self._with_top else None,
            "text_offset": [row[3] for row in rows],
        }


class _Choice:
    """One choice of one prompt, under its own index."""

    def __init__(self, index: int, entered: Entered, *, echo: bool, logprobs: int | None) -> None:
        self.index = index
        self.text = ChoiceText.of(entered.text)
        self.echoed = _prompt_text(entered) if echo else ""
        self.logprobs = None if logprobs is None else _Logprobs(with_top=logprobs > 0)

    def feed(self, piece: Piece) -> list[tuple[str, Any]]:
        """(text, logprobs) of each new token."""
        shown = self.text.feed(piece)
        if self.logprobs is None:
            return [(one, None) for one in shown]
        pairs = zip(shown, piece.logprobs, strict=True)
        return [(text, self.logprobs.take(self.text, text, one)) for text, one in pairs]


class CompletionFrames:
    """Always: each choice's last chunk, and no other, has a finish reason."""

    def __init__(self, request: schemas.CompletionRequest, group: Group) -> None:
        self._group = group
        self._num_choices = request.n or 1
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._created = int(time.time())
        self._choices = [
            _Choice(number * self._num_choices + i, one, echo=bool(request.echo), logprobs=request.logprobs)
            for number, one in enumerate(group.entered)
            for i in range(self._num_choices)
        ]

    def _choice_of(self, number: int, piece: Piece) -> _Choice:
        return self._choices[number * self._num_choices + piece.choice]

    def preamble(self) -> bytes:
        return b"".join([self._chunk(one.index, one.echoed) for one in self._choices if one.echoed])

    def piece(self, number: int, piece: Piece) -> bytes:
        choice = self._choice_of(number, piece)
        chunks = [self._chunk(choice.index, text, logprobs) for text, logprobs in choice.feed(piece)]
        if piece.end is not None and piece.end.reason in ("stop", "length"):
            chunks.append(self._chunk(choice.index, "", finish_reason=piece.end.reason))
        return b"".join(chunks)

    def keep(self, number: int, piece: Piece) -> None:
        self._choice_of(number, piece).feed(piece)

    def tail(self, finished: Sequence[Finished]) -> bytes:
        if not self._include_usage:
            return b""
        return event({**self._envelope(), "choices": [], "usage": self._usage(finished)})

    def whole(self, finished: Sequence[Finished]) -> bytes:
        reasons = [end.reason for one in finished for end in one.choices]
        choices = [
            {
                "index": one.index,
                "text": one.echoed + "".join(one.text.parts),
                "logprobs": None if one.logprobs is None else one.logprobs.whole(),
                "finish_reason": reason,
            }
            for one, reason in zip(self._choices, reasons, strict=True)
        ]
        return encode({**self._envelope(), "choices": choices, "usage": self._usage(finished)})

    def _usage(self, finished: Sequence[Finished]) -> Mapping[str, Any]:
        return usage(finished, self._group.entered[0].max_tokens)

    def _envelope(self) -> dict[str, Any]:
        first = self._group.entered[0]
        return {
            "id": f"cmpl-{first.response_id}",
            "object": "text_completion",
            "created": self._created,
            "model": first.text.model,
            "service_tier": first.service_tier,
            "system_fingerprint": None,
        }

    def _chunk(self, index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._envelope(), "choices": [choice], **usage})


def _prompt_text(entered: Entered) -> str:
    return "".join(Detokenizer(entered.text).feed(entered.stream.submit.prompt_token_ids))


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)
