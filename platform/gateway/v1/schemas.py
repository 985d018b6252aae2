"""Bodies of /v1 as msgspec structs: strict types, closed fields, and the words for what is wrong with one.

Knows shapes; refuses to know models, classes and limits. Booleans are no integers, unknown fields are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.door import Ask
from gateway.errors import Reason, invalid
from gateway.text import Message
from wire.messages import SamplingParameters

MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOPS = 4

Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Milliseconds = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Tier = Literal["auto", "default", "flex", "priority", "fast"]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Any = None  # what the API itself sends back with output_text
    logprobs: Any = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that a chat completion and a response have in common."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: CountOrZero | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    min_tokens: CountOrZero | None = None
    ignore_eos: bool | None = None
    service_tier: Tier | None = None
    deadline_ms: Milliseconds | None = None
    completion_deadline_ms: Milliseconds | None = None
    max_queue_wait_ms: Milliseconds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # taken and without effect
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    # understood, and refused unless they ask for nothing (``unsupported``)
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Any = None
    prompt_cache_retention: Any = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Any = None
    logprobs: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseCreate(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``response.create`` of the websocket protocol."""

    type: Literal["response.create"]
    model: str
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    event_id: str | None = None
    text: Any = None
    truncation: Any = None
    include: Any = None
    background: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    reasoning: Any = None
    generate: Any = None
    max_tool_calls: Any = None


class ResponseCancel(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["response.cancel"]
    response_id: str
    event_id: str | None = None
    stream_id: str | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "annotations": ([],),
    "include": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
    "background": (False,),
    "generate": (True,),
    "reasoning_effort": ("none",),
    "prompt_cache_retention": ("in_memory",),
}
_UNSUPPORTED = (
    *("tools", "tool_choice", "top_logprobs", "prompt_cache_retention", "n", "logprobs", "response_format"),
    *("modalities", "audio", "prediction", "functions", "function_call", "reasoning_effort", "verbosity"),
    *("web_search_options", "moderation", "prompt_cache_options", "tool_calls", "annotations", "text", "truncation"),
    *("include", "background", "conversation", "prompt", "reasoning", "generate", "max_tool_calls"),
    "previous_response_id",
)

Body = TypeVar("Body", bound=Struct)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Raises InvalidRequest with the field's name as ``param``."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "The body is empty." if not body.strip() else f"The body is not valid JSON: {error}."
        raise invalid(Reason.INVALID_REQUEST, what) from error
    except RecursionError as error:
        raise invalid(Reason.INVALID_REQUEST, "The body is nested too deeply.") from error


def _refuse_field(words: str) -> NoReturn:
    match = _PATH.match(words)
    assert match is not None  # the pattern takes any text
    what, path = match["what"], (match["path"] or "").lstrip(".")
    for pattern, reason, verb in (
        (_UNKNOWN, Reason.UNKNOWN_PARAMETER, "Unknown parameter"),
        (_MISSING, Reason.MISSING_PARAMETER, "Missing required parameter"),
    ):
        if named := pattern.match(what):
            name = f"{path}.{named['name']}" if path else named["name"]
            raise invalid(reason, f"{verb}: {name!r}.", name[:200])
    if not path:
        raise invalid(Reason.INVALID_REQUEST, "The body must be a JSON object.")
    reason = Reason.INVALID_TYPE if ", got `" in what else Reason.INVALID_VALUE
    raise invalid(reason, f"Invalid {path!r}: {what}.", path)


def refuse_unsupported(body: Struct, where: str = "") -> None:
    """Raises InvalidRequest for the first field that asks for something this server does not do; never ignores it."""
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value is None or any(
            type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())
        ):
            continue
        param = f"{where}{name}"
        raise invalid(Reason.UNSUPPORTED_PARAMETER, f"{param!r} is not supported here with this value.", param)


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


def chat_max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The number asked for, and the field that asked."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        words = "max_tokens and max_completion_tokens differ; send only max_completion_tokens."
        raise invalid(Reason.INVALID_VALUE, words, "max_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def ask(
    request: SamplingFields,
    *,
    model: str,
    messages: tuple[Message, ...],
    max_tokens: int | None,
    max_tokens_param: str,
    source: str,
    received_at_s: float,
    vocabulary_size: int | None,
) -> Ask:
    """The same values for every door. ``vocabulary_size`` None: the model is unknown, and will be refused for that."""
    return Ask(
        model=model,
        messages=messages,
        source=source,
        received_at_s=received_at_s,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        sampling=_sampling(request, vocabulary_size),
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
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise invalid(Reason.INVALID_VALUE, "Keys of logit_bias are token ids written as strings.", "logit_bias")
        if vocabulary_size is not None and int(key) >= vocabulary_size:
            raise invalid(Reason.INVALID_VALUE, f"Token id {key} is outside the vocabulary.", "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)
