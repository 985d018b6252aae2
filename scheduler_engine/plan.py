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


class DecodingSequence(NamedTuple):
    """A request that decodes, for as long as it does. ``output_ids`` and ``block_table`` are live views."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    output_ids: Sequence[int]
    block_table: Sequence[int]
    sampling: object


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Rows that each compute the newest token of a sequence and draw one more, as aligned columns.

    ``request_ids`` and ``sequences`` are the same objects from step to step while the same requests decode.
    ``num_outputs``: how long each output is before the step; the row's token is the last of prompt and output, at
    position ``prompt length + num_outputs - 1``. ``num_attended``: sum over the rows of the tokens they attend to.
    """

    request_ids: Sequence[RequestId] = ()
    sequences: Sequence[DecodingSequence] = ()
    num_outputs: Sequence[int] = ()
    num_attended: int = 0

    def __len__(self) -> int:
        return len(self.request_ids)

    def rows(self) -> list[ScheduledRow]:
        return [self._row(sequence, num) for sequence, num in zip(self.sequences, self.num_outputs, strict=True)]

    @staticmethod
    def _row(sequence: DecodingSequence, num_output: int) -> ScheduledRow:
        request_id, prompt, output, table, sampling = sequence
        token_ids = output[num_output - 1 : num_output] if num_output else prompt[-1:]
        return ScheduledRow(request_id, token_ids, len(prompt) + num_output - 1, table, True, output, sampling)


NO_DECODES = DecodeColumns()


class BlockCopy(NamedTuple):
    """One block of one request to be copied between the device pool and the host pool."""

    request_id: RequestId
    device_block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step. Order inside it: swap_out copies, swap_in copies, then one forward over all rows, decodes first.

    ``chunks`` are rows that are spelled out: prefills, and whatever a test or a calibration wants computed.
    ``token_budget`` is what the step was allowed. ``wake_at_us``: when the engine next has a timer to serve, for a loop
    that would otherwise sleep; None = only input wakes it.
    """

    step: int
    chunks: tuple[ScheduledRow, ...]
    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    token_budget: int
    wake_at_us: int | None
    decodes: DecodeColumns = NO_DECODES

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """All of them alike, decodes first. Made when asked for: ask once. A plan that was carried out still knows its
        positions and tokens.
        """
        return (*self.decodes.rows(), *self.chunks)

    @property
    def is_empty(self) -> bool:
        """True when an executor has nothing to do; ``apply_step`` must still be called with an empty result."""
        return not (self.decodes or self.chunks or self.swap_out or self.swap_in)


class RowFailure(NamedTuple):
    """A request the executor could not compute; the engine sends it back to waiting by recompute, or ends it."""

    request_id: RequestId
    reason: str  # "out_of_memory" | "not_finite" | "kernel_error"
    poison: bool  # failed alone: end it, do not retry


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor did with a plan. ``sampled_token_ids`` is aligned with ``plan.rows``: decodes, then chunks; -1
    where a row did not sample or failed.

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
