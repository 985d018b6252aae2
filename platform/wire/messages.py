"""Everything that crosses the Bus, as frozen standard-library dataclasses.

Times are durations in microseconds: clocks of two machines are never compared. ``response_id`` is a UUIDv7 as text
made by the gateway; ``attempt`` counts dispatches of the same response from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_engine.policy import PolicySnapshot, PriorityClass

PROTOCOL_VERSION = 1
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like: a JSON schema, a regular expression or a Lark grammar, by ``kind``."""

    kind: str  # "json_object" | "json_schema" | "regex" | "lark"
    source: str = ""  # empty for json_object


Wait = tuple[str, str, str, int]  # (phase, cause, class that had what was missing or "", microseconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are drawn. ``temperature`` 0 is greedy. Seeded: the stream is a function of (seed, choice,
    position).

    ``presence_penalty`` and ``frequency_penalty`` count the output, ``repetition_penalty`` prompt and output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_top_logprobs: int | None = None  # 0 to MAX_TOP_LOGPROBS; None: no logprobs asked
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    response_id: str
    attempt: int
    gateway_id: str
    tenant_id: str
    project_id: str
    key_id: str
    priority_class: PriorityClass
    model: str
    worker_epoch: int = 0  # for this epoch of the worker and no other; 0: for any
    prompt_token_ids: tuple[int, ...]
    num_choices: int = 1  # siblings: one prompt in usage, the outputs of all
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    max_tokens: int = 512
    min_tokens: int = 0  # no stop token is drawn before so many tokens are there
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[bytes, ...] = ()
    remaining_first_token_us: int | None = None
    remaining_hard_deadline_us: int | None = None
    max_queue_wait_us: int | None = None
    value_micros: int = 1
    cache_salt: str = ""
    reproducible: bool = False
    delivered_token_ids: tuple[tuple[int, ...], ...] = ()
    ended_choices: tuple[ChoiceEnd, ...] = ()  # in an earlier attempt: they are not computed again
    policy_version: int = 0
    price_version: int = 0
    remaining_completion_us: int | None = None  # to the last token: refuses before the start, only orders after it
    is_return: bool = False  # the client was refused with a Retry-After and is back


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    response_id: str
    attempt: int
    reason: str  # "client" | "admin" | "gateway_lost" | "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A gateway takes over the stream of a live response; tokens from ``from_index`` on are sent to it."""

    response_id: str
    attempt: int
    gateway_id: str
    from_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """The policy now in force; the engine takes it between two steps."""

    snapshot: PolicySnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    response_id: str
    attempt: int
    position: int
    estimated_start_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Ends the response: refused at the door or shed before its first token. Never charged."""

    response_id: str
    attempt: int
    reason: str  # RejectReason value
    retry_after_us: int | None
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of one step for one gateway, as aligned columns. A token that may belong to a stop string
    is held back until that is decided, so an entry is final, and may carry several tokens of one choice.
    """

    worker_id: str
    epoch: int
    step: int
    response_ids: tuple[str, ...]
    attempts: tuple[int, ...]
    choices: tuple[int, ...]
    first_indexes: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprob | None, ...] | None, ...] = ()  # empty when no row asked


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Of the model's own distribution, before penalties, bias, grammar and temperature. ``top``: the likeliest first.

    A token that an earlier attempt delivered has none (None in its place).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """What the response cost, summed over its choices.

    ``waits``: where the time of the choice that waited longest went; those of phase "queued" (before its first start;
    the other is "paused") sum to ``queue_us``. Causes are the labels of the engine's ``record.Cause``.
    """

    queue_us: int = 0
    ttft_us: int | None = None
    total_us: int = 0
    num_steps: int = 0
    num_holds: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    recomputed_tokens: int = 0
    swapped_bytes: int = 0
    gpu_us: int = 0
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    choice: int
    reason: str  # FinishReason value
    visible_bytes: int | None = None  # set when a stop string cut the text: bytes of text to show
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    response_id: str
    attempt: int
    choices: tuple[ChoiceEnd, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    counters: EngineCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinished:
    """One choice of several has ended while others go on; the last one's end comes with Finished."""

    response_id: str
    attempt: int
    end: ChoiceEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Another gateway owns the response from now on; nothing of it will come here any more."""

    response_id: str
    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Appended to the durable usage stream by the admit script, before the Submit."""

    response_id: str
    tenant_id: str
    project_id: str
    key_id: str
    priority_class: PriorityClass
    model: str
    source: str  # "rest" | "sse" | "ws" | "batch" | "console"
    money_micros: int
    reserved_tokens: int
    window_id: str
    policy_version: int
    price_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The worker's count, the only count there is. Cumulative; ``terminal`` closes the operation."""

    response_id: str
    attempt: int
    tenant_id: str
    project_id: str
    key_id: str
    priority_class: PriorityClass
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    terminal: str  # "completed" | "cancelled_client" | "cancelled_admin" | "shed" | "failed_platform" | "expired"
    policy_version: int
    price_version: int
    counters: EngineCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A reservation whose Submit never reached an engine (the gateway gave up before dispatch).

    Ends the operation at zero.
    """

    response_id: str
    tenant_id: str
    reason: str


LOGPROBS, GRAMMAR = "logprobs", "grammar"  # features of a worker
HISTOGRAM_BOUNDS_MS = (
    5,
    10,
    25,
    50,
    100,
    200,
    300,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    30_000,
    60_000,
    300_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations by bucket. ``counts[i]`` are those <= HISTOGRAM_BOUNDS_MS[i] and above the bound before; the last is
    the rest.
    """

    counts: tuple[int, ...]
    sum_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSnapshot:
    """One class on one worker. Counters are since its epoch began; gauges are now."""

    priority_class: PriorityClass
    num_waiting: int
    num_running: int
    num_suspended: int
    waiting_gpu_us: int
    estimated_start_q50_us: int
    estimated_start_q90_us: int
    closed: bool
    retry_after_us: int | None
    prompt_tokens: int
    output_tokens: int
    queue_wait: Histogram
    ttft: Histogram
    preemptions: tuple[tuple[str, str, int], ...]  # (lever, resource, count) of requests of this class
    shed: tuple[tuple[str, int], ...]  # (reason, count): rejected at the door or ended before the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRow:
    """One request on the device, for the live page."""

    response_id: str
    tenant_id: str
    priority_class: PriorityClass
    state: str
    num_blocks: int
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """Published by each worker every 250 ms from its I/O thread."""

    worker_id: str
    epoch: int
    model: str
    ready: bool
    draining: bool
    max_model_len: int
    last_step_age_us: int
    step: int
    num_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_slots: int
    num_free_slots: int
    policy_version: int
    prompt_tokens_total: int
    output_tokens_total: int
    busy_us_total: int
    classes: tuple[ClassSnapshot, ...]
    board: tuple[BoardRow, ...] = ()
    features: tuple[str, ...] = ()  # what it can do that not every worker can: LOGPROBS, GRAMMAR
    num_cache_tokens: int = 0  # tokens that the device's KV cache holds


ToWorker = Submit | Cancel | Attach | PolicyChanged
ToGateway = Accepted | Rejected | Tokens | ChoiceFinished | Finished | Moved
ToLedger = Reserved | Usage | Released
Message = ToWorker | ToGateway | ToLedger | LoadSnapshot
