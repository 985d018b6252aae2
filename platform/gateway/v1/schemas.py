"""Bodies of /v1 as msgspec structs: strict types, closed fields, and the words for what is wrong with one.

Knows shapes; refuses to know models, classes and limits. Booleans are no integers, unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOPS = 4
MAX_STOP_BYTES = 256  # every token's text is searched for every stop string
MAX_MODEL_NAME = 200
MAX_CHOICES = 16
MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5
MAX_PROMPTS = 64

Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Milliseconds = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Seed = Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
ResponseName = Annotated[str, Meta(max_length=64)]
ModelName = Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
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
    prompt_cache_retention: Any = None


class JsonSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a response's text must look like; the fields but ``type`` are those of ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextShape(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Choices | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
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


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelName
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Count | None = None
    n: Choices | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Any = None
    suffix: Any = None


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseCreate(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses, and ``response.create`` of the websocket protocol."""

    type: Literal["response.create"] | None = None
    model: ModelName
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    event_id: str | None = None
    text: TextShape | None = None
    truncation: Any = None
    include: Any = None
    background: bool | None = None
    top_logprobs: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    reasoning: Any = None
    generate: Any = None
    max_tool_calls: Any = None


class ResponseCancel(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["response.cancel"]
    response_id: ResponseName
    event_id: str | None = None
    stream_id: str | None = None


class ResponseResume(Struct, frozen=True, forbid_unknown_fields=True):
    """Our own: go on reading where a socket was lost; events up to ``starting_after`` are left out."""

    type: Literal["response.resume"]
    response_id: ResponseName
    starting_after: Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] = -1
    event_id: str | None = None
    stream_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Ping(Struct, frozen=True, forbid_unknown_fields=True):
    """Our own: answered by a pong in its lane."""

    type: Literal["ping"]
    event_id: str | None = None
    stream_id: str | None = None
