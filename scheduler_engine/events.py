"""What a step meant for the world: outcomes as values, token output as columns."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_engine.request import RequestId


class FinishReason(enum.StrEnum):
    """How a request ended, once."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    SHED = "shed"  # for shells: how a Rejected request ended
    FAILED = "failed"


class RejectReason(enum.StrEnum):
    """Why a request was not let in, or was ended before it started. The gateway maps each to a status."""

    NEVER_FITS = "never_fits"
    CONTEXT_LENGTH = "context_length"
    LATE = "late"  # its deadline cannot be met
    QUEUE_WAIT = "queue_wait"  # waited longer than it allowed
    CLASS_CLOSED = "class_closed"
    DRAINING = "draining"
    NOT_ALLOWED = "not_allowed"
    DUPLICATE = "duplicate"
    GRAMMAR = "grammar"  # said by the worker, never by the engine: what the answer must look like is no grammar


class Lever(enum.StrEnum):
    """How a running request gave way."""

    HOLD = "hold"  # keeps its KV; loses its slot, or for STEP_TIME only its place in some steps
    SWAP = "swap"  # KV copied to host memory
    RECOMPUTE = "recompute"  # KV dropped, computed again on resume


class Resource(enum.StrEnum):
    """What was short."""

    SLOTS = "slots"
    MEMORY = "memory"
    STEP_TIME = "step_time"
    FAIRNESS = "fairness"
    FAILURE = "failure"


class Accepted(NamedTuple):
    request_id: RequestId
    position: int  # requests ahead of it in its class
    estimated_start_us: int


class Wait(NamedTuple):
    """Time in which a request did not run, for one cause: ``queued`` before its first start, ``paused`` after.

    ``cause`` is the label of a ``record.Cause``; ``held_by`` the class that had what was missing, "" for none.
    """

    phase: str
    cause: str
    held_by: str
    duration_us: int


class Rejected(NamedTuple):
    """The end of one that never ran: refused at the door, or shed while it waited (then an Accepted came before).

    Never charged. A request ends with exactly one of Rejected and Finished. ``retry_after_us`` is None where coming
    back cannot help.
    """

    request_id: RequestId
    reason: RejectReason
    retry_after_us: int | None
    waits: tuple[Wait, ...] = ()  # until this was decided


class RequestCounters(NamedTuple):
    """What one request cost. Durations in microseconds; recomputed work is recorded and never billed.

    ``waits`` of phase "queued" sum to ``queue_us``, exactly.
    """

    queue_us: int = 0
    ttft_us: int | None = None
    total_us: int = 0
    num_steps: int = 0
    num_holds: int = 0
    num_swaps: int = 0
    num_recomputes: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    gpu_us: int = 0
    waits: tuple[Wait, ...] = ()


class Finished(NamedTuple):
    """Counts are cumulative. ``prompt_tokens`` are those computed at least once (all of them once a token came)."""

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    counters: RequestCounters
    detail: str = ""  # reject reason, cancel reason or failure reason where there is one


class Preempted(NamedTuple):
    request_id: RequestId
    lever: Lever
    resource: Resource
    by: RequestId | None  # None: growth of its own class, a promise of a higher one between tokens, or a failed row


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """One sampled token per entry, aligned columns."""

    request_ids: Sequence[RequestId] = ()
    indexes: Sequence[int] = ()  # index of the token in the request's output
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything that became true since the last ``apply_step``. Order: accepted, rejected, preempted, resumed, tokens,
    finished. ``filled``: decodes whose last block is full now, so that it can be named.
    """

    step: int
    accepted: tuple[Accepted, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    resumed: tuple[RequestId, ...] = ()
    tokens: TokenColumns = field(default_factory=TokenColumns)
    finished: tuple[Finished, ...] = ()
    filled: tuple[RequestId, ...] = ()
