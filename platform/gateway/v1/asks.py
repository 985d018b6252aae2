"""From a body to an Ask: the same values for every door.

Knows the words of all APIs; refuses to know limits and workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gateway.asking import Ask, Prompt
from gateway.errors import Reason, invalid
from gateway.text import Message, Text
from gateway.v1.decoding import refuse_unsupported
from gateway.v1.schemas import (
    MAX_STOP_BYTES,
    MAX_STOPS,
    ChatRequest,
    ResponseCreate,
    ResponseFormat,
    SamplingFields,
    TextFormat,
    TextPart,
)
from wire.messages import Grammar, SamplingParameters


def chat_messages(request: ChatRequest) -> tuple[Message, ...]:
    messages = []
    for index, message in enumerate(request.messages):
        refuse_unsupported(message, f"messages[{index}].")
        if message.content is None and message.role != "assistant":
            raise invalid(Reason.INVALID_TYPE, "This message needs content.", f"messages[{index}].content")
        messages.append(Message(_template_role(message.role), _joined(message.content)))
    return tuple(messages)


def input_messages(request: ResponseCreate) -> tuple[Message, ...]:
    instructions = [Message("system", request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return (*instructions, Message("user", request.input))
    return (*instructions, *(Message(_template_role(item.role), _joined(item.content)) for item in request.input))


def shown_items(request: ResponseCreate, response_id: str) -> list[dict[str, Any]]:
    """The input as the API shows it again, in order; ids are a function of response and place."""
    if isinstance(request.input, str):
        items = [("user", request.input)]
    else:
        items = [(item.role, _joined(item.content)) for item in request.input]
    return [_shown_item(role, text, f"msg_{response_id}_{place}") for place, (role, text) in enumerate(items)]


def _shown_item(role: str, text: str, item_id: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": "completed", "role": role, "content": [part]}


def chat_max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The number asked for, and the field that asked."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        words = "max_tokens and max_completion_tokens differ; send only max_completion_tokens."
        raise invalid(Reason.INVALID_VALUE, words, "max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def grammar_of(wanted: ResponseFormat | None) -> Grammar | None:
    """What the answer must look like; None for free text."""
    if wanted is None:
        return None
    _refuse_beside(wanted, ("json_schema",), "response_format.")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(kind="json_object")
    if wanted.json_schema is None:
        raise invalid(Reason.MISSING_PARAMETER, "Say which.", "response_format.json_schema")
    return Grammar(kind="json_schema", source=msgspec.json.encode(wanted.json_schema.schema).decode())


def grammar_of_text(wanted: TextFormat | None) -> Grammar | None:
    """The same for a response's ``text.format``."""
    if wanted is None:
        return None
    _refuse_beside(wanted, ("name", "schema", "strict", "description"), "text.format.")
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(kind="json_object")
    for name in ("name", "schema"):
        if getattr(wanted, name) is None:
            param = f"text.format.{name}"
            raise invalid(Reason.MISSING_PARAMETER, f"Missing required parameter: {param!r}.", param)
    return Grammar(kind="json_schema", source=msgspec.json.encode(wanted.schema).decode())


def _refuse_beside(wanted: ResponseFormat | TextFormat, names: Sequence[str], where: str) -> None:
    """What only a JSON schema has, beside another type, would be left out in silence."""
    for name in names:
        if wanted.type != "json_schema" and getattr(wanted, name) is not None:
            raise invalid(Reason.INVALID_VALUE, f"{name!r} goes with type 'json_schema' alone.", f"{where}{name}")


def ask(
    request: SamplingFields,
    *,
    model: str,
    prompt: Prompt,
    prompt_param: str,
    max_tokens: int | None,
    max_tokens_param: str,
    source: str,
    received_at_s: float,
    text: Text | None,
    num_choices: int = 1,
    num_top_logprobs: int | None = None,
    grammar: Grammar | None = None,
    grammar_param: str = "response_format",
) -> Ask:
    """The same values for every door. ``text`` None: the model is unknown, and will be refused for that."""
    if request.store and prompt_param != "input":
        raise invalid(Reason.UNSUPPORTED_PARAMETER, "'store' is for responses; nothing else is kept.", "store")
    sampling = _sampling(request, text.vocabulary_size if text else None)
    return Ask(
        model=model,
        prompt=prompt,
        prompt_param=prompt_param,
        source=source,
        received_at_s=received_at_s,
        num_choices=num_choices,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        grammar_param=grammar_param,
        sampling=replace(sampling, num_top_logprobs=num_top_logprobs, grammar=grammar),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        stop=_stops(request.stop),
        service_tier=request.service_tier,
        deadline_ms=request.deadline_ms,
        completion_deadline_ms=request.completion_deadline_ms,
        max_queue_wait_ms=request.max_queue_wait_ms,
    )


def _template_role(role: str) -> str:
    return "system" if role == "developer" else role


def _joined(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid(Reason.INVALID_VALUE, f"At most {MAX_STOPS} stop strings.", "stop")
    if "" in stops:
        raise invalid(Reason.INVALID_VALUE, "A stop string must not be empty.", "stop")
    if any(len(stop.encode()) > MAX_STOP_BYTES for stop in stops):
        raise invalid(Reason.INVALID_VALUE, f"A stop string may have at most {MAX_STOP_BYTES} bytes of UTF-8.", "stop")
    return stops


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _sampling(request: SamplingFields, vocabulary_size: int | None) -> SamplingParameters:
    return SamplingParameters(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=request.top_k or 0,
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocabulary_size),
        seed=request.seed,
    )


def _logit_bias(bias: dict[str, float], vocabulary_size: int | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and str(int(key)) == key):
            raise invalid(Reason.INVALID_VALUE, "Keys of logit_bias are token ids written as strings.", "logit_bias")
        if vocabulary_size is not None and int(key) >= vocabulary_size:
            raise invalid(Reason.INVALID_VALUE, f"Token id {key} is outside the vocabulary.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)
