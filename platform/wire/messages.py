"""Everything that crosses the Bus, as frozen standard-library dataclasses.

Times are durations in microseconds: clocks of two machines are never compared. ``response_id`` is a UUIDv7 as text
made by the gateway; ``attempt`` counts dispatches of the same response from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_engine.policy import PolicySnapshot, PriorityClass
from wire.snapshots import EMPTY_HISTOGRAM as EMPTY_HISTOGRAM
from wire.snapshots import GRAMMAR as GRAMMAR
from wire.snapshots import HISTOGRAM_BOUNDS_MS as HISTOGRAM_BOUNDS_MS
from wire.snapshots import LOGPROBS as LOGPROBS
from wire.snapshots import MOST_TENANTS as MOST_TENANTS
from wire.snapshots import BoardRow as BoardRow
from wire.snapshots import ClassSnapshot as ClassSnapshot
from wire.snapshots import Histogram as Histogram
from wire.snapshots import LoadSnapshot as LoadSnapshot
from wire.snapshots import PolicyNews as PolicyNews
from wire.snapshots import TenantSnapshot as TenantSnapshot

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
    requested_class: PriorityClass | None = None  # where the policy had it served in a lower class

    @property
    def has_started(self) -> bool:
        """An earlier attempt had begun, or may have: an empty column for a choice that has no token yet."""
        return bool(self.delivered_token_ids)


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
class Drain:
    """Finish what is here, let nothing new in, then end: whoever looks after the worker starts it again."""

    worker_epoch: int  # of this epoch and no other
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """An operator asks where the time of a request goes; Explained answers to ``gateway_id``. Changes nothing."""

    gateway_id: str
    response_id: str
    choice: int = 0


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


MOST_EXPLAINED = 200  # decisions of one request that travel: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Where the time of a request went, in words. ``is_known`` False: the engine does not remember it (any more).

    ``waits``: (phase, words, microseconds), those of a phase sum to ``queue_us`` or ``paused_us``. ``timeline``:
    (microseconds since its arrival, words), oldest first; ``is_whole`` False where older ones are missing.
    """

    response_id: str
    choice: int
    is_known: bool
    sentence: str = ""
    outcome: str = ""  # empty while it lives
    total_us: int = 0
    queue_us: int = 0
    paused_us: int = 0
    ttft_us: int | None = None
    waits: tuple[tuple[str, str, int], ...] = ()
    timeline: tuple[tuple[int, str], ...] = ()
    is_whole: bool = True


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
    requested_class: PriorityClass | None = None  # where the policy had it served in a lower class


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
    requested_class: PriorityClass | None = None  # where the policy had it served in a lower class


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A reservation whose Submit never reached an engine (the gateway gave up before dispatch).

    Ends the operation at zero.
    """

    response_id: str
    tenant_id: str
    reason: str


ToWorker = Submit | Cancel | Attach | PolicyChanged | Drain | Explain
ToGateway = Accepted | Rejected | Tokens | ChoiceFinished | Finished | Moved | Explained
ToLedger = Reserved | Usage | Released
Message = ToWorker | ToGateway | ToLedger | LoadSnapshot
