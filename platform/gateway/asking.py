"""What a caller wants, and what it becomes under a policy: its class, its prompt's token ids, its number of tokens.

Knows one ask at a time; refuses to know limits in use, workers and the Bus.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import assert_never

from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.text import Message, Text, TextError
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.grammars import fault_of, is_supported
from wire.messages import Grammar, SamplingParameters

ENCODE_INLINE_CHARACTERS = 2_048  # a longer prompt is encoded in a thread: it would hold up everybody's tokens
ENCODERS = ThreadPoolExecutor(2, thread_name_prefix="encode")  # many long prompts at once wait for each other
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


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's template makes of messages."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A text to go on with, without any template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt in the model's own tokens."""

    token_ids: tuple[int, ...]


Prompt = Chat | Plain | TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a caller wants, checked for shape. Durations count from ``received_at_s`` (monotonic).

    ``max_tokens`` is for each choice. ``…_param`` are the body's own words for what may be blamed.
    """

    model: str
    prompt: Prompt
    source: str  # "rest" | "sse" | "ws" | "batch" | "console"
    received_at_s: float
    prompt_param: str = "messages"
    max_tokens_param: str = "max_tokens"
    grammar_param: str = "response_format"
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    num_choices: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    service_tier: str | None = None
    deadline_ms: int | None = None
    completion_deadline_ms: int | None = None
    max_queue_wait_ms: int | None = None
    is_return: bool = False  # refused before, and back when told to
    response_id: str | None = None  # given by whoever must know it beforehand: a batch


def requested_class(caller: Caller, ask: Ask) -> PriorityClass:
    """The class a service tier asks for; the project's own class when it asks for none."""
    return TIERS.get(ask.service_tier or "auto", caller.default_class)


async def encode_prompt(text: Text, ask: Ask, context_length: int) -> tuple[int, ...] | Refusal:
    """The prompt's token ids: at least one, and at least one less than the context holds, for the answer."""

    def refusal(reason: Reason, message: str) -> Refusal:
        return Refusal(reason=reason, message=message, param=ask.prompt_param)

    num_characters = _num_characters(ask.prompt)
    least = text.least_tokens(num_characters)
    try:
        if least >= context_length:
            prompt: tuple[int, ...] | None = None
        elif num_characters > ENCODE_INLINE_CHARACTERS:
            prompt = await asyncio.get_running_loop().run_in_executor(ENCODERS, _token_ids, text, ask.prompt)
        else:
            prompt = _token_ids(text, ask.prompt)
    except TextError as error:
        return refusal(Reason.INVALID_VALUE, f"The chat template refuses: {error}")
    if prompt is None or len(prompt) >= context_length:
        needed = f"has {len(prompt)}" if prompt is not None else f"has at least {least}"
        words = f"This model's context length is {context_length} tokens; the prompt {needed}, which leaves no room."
        return refusal(Reason.CONTEXT_LENGTH, words)
    if not prompt:
        return refusal(Reason.INVALID_VALUE, "The prompt is empty.")
    outside = next((token_id for token_id in prompt if token_id >= text.vocabulary_size), None)
    if outside is not None:
        return refusal(Reason.INVALID_VALUE, f"Token id {outside} is outside the vocabulary.")
    return prompt


async def grammar_fault(grammar: Grammar | None, param: str) -> Refusal | None:
    """What is wrong with a grammar, told to its author before anything is taken. Where the extra is not installed the
    worker alone judges it.
    """
    if grammar is None or grammar.kind == "json_object" or not is_supported():
        return None
    fault = await asyncio.to_thread(fault_of, grammar)
    if fault is None:
        return None
    return Refusal(reason=Reason.INVALID_VALUE, message=f"The schema cannot be followed: {fault}", param=param)


def _num_characters(prompt: Prompt) -> int:
    match prompt:
        case Chat(messages=messages):
            return sum(len(message.content) for message in messages)
        case Plain(text=text):
            return len(text)
        case TokenIds():
            return 0
        case _:
            assert_never(prompt)


def _token_ids(text: Text, prompt: Prompt) -> tuple[int, ...]:
    match prompt:
        case Chat(messages=messages):
            return text.chat_prompt(messages)
        case Plain(text=plain):
            return text.plain_prompt(plain)
        case TokenIds(token_ids=token_ids):
            return token_ids
        case _:
            assert_never(prompt)


def effective_max_tokens(ask: Ask, quota: TenantClassPolicy, prompt_tokens: int, context_length: int) -> int | Refusal:
    """The number, for each choice, that reservation, engine and answer all use."""
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
