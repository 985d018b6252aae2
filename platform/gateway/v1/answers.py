"""What the answers of all endpoints have in common: outcomes, usage, texts of choices, log probabilities.

Knows the worker's ends and OpenAI's words for them; refuses to know sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gateway.door import Entered
from gateway.errors import Reason, Refusal, from_reject
from gateway.response_stream import End, Lost, Piece
from gateway.text import Detokenizer, Text
from scheduler_engine.events import FinishReason, RejectReason
from scheduler_engine.policy import PriorityClass
from wire.messages import ChoiceEnd, Finished, Rejected, TokenLogprob

WISHES = ("", "client", "admin")  # cancels that somebody asked for; the others are the platform's failures
LEAST_LOGPROB = -9_999.0  # OpenAI's own word for "hardly ever"; JSON has no infinity
encode = msgspec.json.Encoder().encode


def outcome_of(end: End, priority_class: PriorityClass, grammar_param: str = "response_format") -> Finished | Refusal:
    """The worker's end where every choice came to a good one, or why there is no answer."""
    if isinstance(end, Rejected):
        rejected = from_reject(end.reason, priority_class, end.retry_after_us)
        return replace(rejected, param=grammar_param) if end.reason == RejectReason.GRAMMAR else rejected
    if isinstance(end, Lost):
        return end.refusal
    for choice in sorted(end.choices, key=lambda choice: choice.detail == "sibling_refused"):
        refusal = _bad_end(choice, priority_class, grammar_param)
        if refusal is not None:
            return refusal
    return end


def _bad_end(choice: ChoiceEnd, priority_class: PriorityClass, grammar_param: str) -> Refusal | None:
    match choice.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.SHED:
            return from_reject(choice.detail, priority_class, None)
        case FinishReason.CANCELLED if choice.detail in WISHES:
            return Refusal(reason=Reason.CANCELLED, message="The response was cancelled.")
        case FinishReason.CANCELLED:
            message = "The worker went away in the middle of this response; please send the request again."
            return Refusal(reason=Reason.WORKER_LOST, message=message)
        case FinishReason.FAILED if choice.detail == RejectReason.GRAMMAR:
            message = "The format asked for has led to where nothing may follow; nothing was charged."
            return Refusal(reason=Reason.INVALID_VALUE, message=message, param=grammar_param)
        case _:
            return Refusal(reason=Reason.FAILED, message="The model could not compute this response.")


def explained(refusal: Refusal, end: End, entered: Entered) -> Refusal:
    """A request that can never fit is told its numbers."""
    if not (isinstance(end, Rejected) and end.reason == RejectReason.NEVER_FITS and entered.num_cache_tokens):
        return refusal
    words = (
        f"{entered.prompt_tokens} prompt tokens and {entered.max_tokens} output tokens may need more cache memory than"
        f" class {entered.priority_class.label} can have; the device holds {entered.num_cache_tokens} tokens in all."
    )
    return replace(refusal, message=words)


@dataclass(slots=True)
class ChoiceText:
    """One choice's growing text. Always: what was shown is never taken back."""

    text: Text
    detokenizer: Detokenizer
    parts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, text: Text) -> ChoiceText:
        return cls(text, Detokenizer(text))

    def feed(self, piece: Piece) -> list[str]:
        """Text of each new token; empty where a character is not complete or a stop string cut it away."""
        visible_bytes = None if piece.end is None else piece.end.visible_bytes
        shown = self.detokenizer.feed(piece.token_ids, visible_bytes)
        self.parts += shown
        return shown


def usage(finished: Iterable[Finished], max_tokens: int) -> dict[str, Any]:
    """The worker's count, the only count there is. ``max_tokens`` is the number that was reserved for each choice."""
    ends = list(finished)
    prompt, output = sum(end.prompt_tokens for end in ends), sum(end.output_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends), "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0, "max_tokens": max_tokens},
    }


def chat_logprobs(text: Text, logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
    """OpenAI's object; tokens that show nothing (the end of the turn) are left out."""
    content = [_chat_logprob(text, one) for one in logprobs if one and text.shown_bytes(one.token_id)]
    return {"content": content, "refusal": None}


def _chat_logprob(text: Text, one: TokenLogprob) -> dict[str, Any]:
    top = [_token(text, token_id, logprob) for token_id, logprob in one.top]
    return {**_token(text, one.token_id, one.logprob), "top_logprobs": top}


def _token(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    shown = text.token_bytes(token_id)
    return {"token": token_text(text, token_id), "logprob": max(LEAST_LOGPROB, logprob), "bytes": list(shown)}


def token_text(text: Text, token_id: int) -> str:
    """One token by itself; half a character is shown as U+FFFD."""
    return text.token_bytes(token_id).decode(errors="replace")


def cost_headers(finished: Finished) -> dict[str, str]:
    return {"x-queue-ms": str(finished.counters.queue_us // 1_000)}


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"
