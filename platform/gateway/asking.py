"""What a caller wants, and what it becomes under a policy: its class, its prompt's token ids, its number of tokens.

Knows one ask at a time; refuses to know limits in use, workers and the Bus.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.text import Message, Text, TextError
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import SamplingParameters

ENCODE_INLINE_CHARACTERS = 16_384  # a longer prompt is encoded in a thread: it would hold up everybody's tokens
TIERS = {
    "priority": PriorityClass.INTERACTIVE,
    "fast": PriorityClass.INTERACTIVE,
    "default": PriorityClass.DEFAULT,
    "flex": PriorityClass.BATCH,
}
TIER_OF_CLASS = {
    PriorityClass.INTERACTIVE: "priority",
    PriorityClass.DEFAULT: "default",
    PriorityClass.BATCH: "flex",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a caller wants, checked for shape. Durations count from ``received_at_s`` (monotonic)."""

    model: str
    messages: tuple[Message, ...]
    source: str  # "rest" | "sse" | "ws"
    received_at_s: float
    max_tokens_param: str = "max_tokens"
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    service_tier: str | None = None
    deadline_ms: int | None = None
    completion_deadline_ms: int | None = None
    max_queue_wait_ms: int | None = None


def requested_class(caller: Caller, ask: Ask) -> PriorityClass:
    """The class a service tier asks for; the project's own class when it asks for none."""
    return TIERS.get(ask.service_tier or "auto", caller.default_class)


async def encode_prompt(text: Text, messages: tuple[Message, ...], context_length: int) -> tuple[int, ...] | Refusal:
    """The prompt's token ids; at least one token must be left for the answer."""
    too_long = Refusal(
        reason=Reason.CONTEXT_LENGTH,
        message=f"This model's context length is {context_length} tokens; the prompt leaves no room for an answer.",
        param="messages",
    )
    if text.least_tokens(messages) >= context_length:
        return too_long
    try:
        if sum(len(message.content) for message in messages) > ENCODE_INLINE_CHARACTERS:
            prompt = await asyncio.to_thread(text.chat_prompt, messages)
        else:
            prompt = text.chat_prompt(messages)
    except TextError as error:
        return Refusal(reason=Reason.INVALID_VALUE, message=f"The chat template refuses: {error}", param="messages")
    return prompt if len(prompt) < context_length else too_long


def effective_max_tokens(ask: Ask, quota: TenantClassPolicy, prompt_tokens: int, context_length: int) -> int | Refusal:
    """The number that reservation, engine and answer all use."""
    room = context_length - prompt_tokens
    if ask.max_tokens is None:
        caps = (quota.default_max_tokens, quota.max_tokens_cap, room)
        max_tokens = max(1, min(cap for cap in caps if cap is not None))
    else:
        max_tokens = ask.max_tokens
    if max_tokens > room:
        message = (
            f"{prompt_tokens} prompt tokens and {max_tokens} output tokens exceed the context of {context_length}."
        )
        return Refusal(reason=Reason.CONTEXT_LENGTH, message=message, param=ask.max_tokens_param)
    if quota.max_tokens_cap is not None and max_tokens > quota.max_tokens_cap:
        message = f"{ask.max_tokens_param} may be at most {quota.max_tokens_cap} in this class."
        return Refusal(reason=Reason.INVALID_VALUE, message=message, param=ask.max_tokens_param)
    if ask.min_tokens > max_tokens:
        message = f"min_tokens ({ask.min_tokens}) is above {ask.max_tokens_param} ({max_tokens})."
        return Refusal(reason=Reason.INVALID_VALUE, message=message, param="min_tokens")
    return max_tokens
