"""What one step shall do and what it did: frozen data between the engine and an executor.

Both verbs of the engine hang on these: ``plan_step`` returns a StepPlan, ``apply_step`` takes a StepResult.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_engine.request import RequestId


class ScheduledRow(NamedTuple):
    """One request's share of a step: compute ``token_ids`` at positions ``[start, start + len(token_ids))``.

    ``block_table[i]`` is the device block of positions ``[i * block_size, (i + 1) * block_size)``; it and
    ``output_ids`` (tokens sampled so far) are live views: read them during ``execute`` only, never change them.
    ``samples``: the row ends at the newest token, so exactly one new token is drawn from its last position.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool
    output_ids: Sequence[int]
    sampling: object


class BlockCopy(NamedTuple):
    """One block of one request to be copied between the device pool and the host pool."""

    request_id: RequestId
    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step. Order inside it: swap_out copies, swap_in copies, then one forward over ``rows``.

    ``rows`` holds decodes and prefill chunks alike (one rule of progress). ``token_budget`` is what the step was
    allowed. ``wake_at_us``: when the engine next has a timer to serve, for a loop that would otherwise sleep; None =
    only input wakes it.
    """

    step: int
    rows: tuple[ScheduledRow, ...]
    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    token_budget: int
    wake_at_us: int | None

    @property
    def is_empty(self) -> bool:
        """True when an executor has nothing to do; ``apply_step`` must still be called with an empty result."""
        return not (self.rows or self.swap_out or self.swap_in)


class RowFailure(NamedTuple):
    """A request the executor could not compute; the engine sends it back to waiting by recompute, or ends it."""

    request_id: RequestId
    reason: str  # "out_of_memory" | "not_finite" | "kernel_error"
    poison: bool  # failed alone: end it, do not retry


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor did with a plan. ``sampled_token_ids`` is aligned with ``plan.rows``; -1 where a row did not
    sample or failed.

    ``stopped`` names requests whose text met a stop string with this token (found in the worker, on bytes).
    ``completed_copies`` names requests whose swap_out copies have completed (only read when copies are not in order).
    ``logprobs`` and ``margins`` (top logit less the second) are aligned with ``plan.rows`` or empty; opaque to the
    engine.
    """

    step: int
    duration_us: int
    sampled_token_ids: Sequence[int] = ()
    stopped: frozenset[RequestId] = frozenset()
    failed: tuple[RowFailure, ...] = ()
    completed_copies: tuple[RequestId, ...] = ()
    logprobs: Sequence[object | None] = ()
    margins: Sequence[float] = ()
