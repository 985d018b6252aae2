"""The executor that runs a real model on this machine. Knows plans, failures and time; the mathematics is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_worker.device import cuda_device
from gpu_worker.device.calibration import measure, warm_up
from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.model_runner import SIZES, ModelRunner, blocks_of
from gpu_worker.device.sampling import GREEDY, NOT_DRAWN, Draw, Sampler, stream_of
from gpu_worker.executor import ConstraintError, DeviceLost, DrawRules, ExecutorShape
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.llama import Llama
from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import RowFailure, ScheduledRow, StepPlan, StepResult
from scheduler_engine.request import RequestId
from wire.messages import SamplingParameters, TokenLogprob

if TYPE_CHECKING:
    from gpu_worker.device.decode_graphs import Capture


@dataclass(slots=True)
class _Outcome:
    """Columns of a StepResult while they fill; keyed by the row's place in the plan."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    margins: list[float]
    failed: list[RowFailure] = field(default_factory=list)


class ModelExecutor:
    """Always: a row that fails leaves the other rows' tokens and blocks as they would be without it."""

    def __init__(
        self, model: Llama, cache: KvCache, shape: ExecutorShape, *, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.shape = shape
        self.with_margins = False  # tests record them; a second best costs a pass over the logits
        self._runner = ModelRunner(model, cache)
        self.cache = cache
        self._sampler = Sampler(model.config.vocab_size, model.target.device)
        self._clock_ns = clock_ns
        self._stream_of: dict[RequestId, int] = {}
        self._failed_before: set[RequestId] = set()
        self._grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")  # starts with its first mask

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``. Never raises for what a row does; the clock covers copies, forward and sampling.

        Raises DeviceLost when the device itself is at fault.
        """
        started_ns = self._clock_ns()
        with torch.inference_mode():
            self._copy(plan)
            outcome = self._compute(plan.rows)
        return StepResult(
            step=plan.step,
            duration_us=(self._clock_ns() - started_ns) // 1_000,
            sampled_token_ids=outcome.token_ids,
            failed=tuple(outcome.failed),
            logprobs=outcome.logprobs if any(outcome.logprobs) else (),
            margins=outcome.margins if self.with_margins else (),
        )

    @property
    def described(self) -> str:
        """What computes, in a sentence for the log."""
        return self._runner.model.target.described

    def calibrate(self) -> CostConstants:
        """Runs a few made-up steps over the pool's first blocks: only before the first plan. Takes some seconds."""
        if self._runner.model.target.device.type == "cuda":
            warm_up(self.execute, self.shape)  # kernels choose their tiles at their first call
            self.capture_decodes(cuda_device.GraphCapture())
        return self.calibrate_costs()

    def capture_decodes(self, capture: Capture, sizes: Sequence[int] | None = None) -> None:
        """See ``ModelRunner.capture_decodes``; ``sizes`` as serving has them unless given."""
        self._runner.capture_decodes(capture, sizes or SIZES)

    def calibrate_costs(self) -> CostConstants:
        """The part of ``calibrate`` that measures."""
        constants = measure(self.execute, self.cache.measure_copy, self.shape, self._clock_ns)
        self._stream_of.clear()
        return constants

    def forget(self, request_id: RequestId) -> None:
        self._stream_of.pop(request_id, None)
        self._failed_before.discard(request_id)

    def close(self) -> None:
        self._grammars.shutdown()

    def _copy(self, plan: StepPlan) -> None:
        """Raises DeviceLost: blocks that leave are given away in the same step, so no row can be computed again."""
        try:
            self.cache.swap_out(plan.swap_out)
            self.cache.swap_in(plan.swap_in)
        except RuntimeError as error:
            raise DeviceLost(f"a copy between device and host failed: {_first_line(error)}") from error

    def _compute(self, rows: Sequence[ScheduledRow]) -> _Outcome:
        size = len(rows)
        outcome = _Outcome([NOT_DRAWN] * size, [None] * size, [0.0] * size)
        if not rows:
            return outcome
        try:
            self._forward(rows, range(size), outcome)
            return outcome
        except (RuntimeError, IndexError) as error:  # what torch raises; one row spoils a whole forward
            reason = _reason(error)  # no more of it: its traceback holds all that the forward had allocated
        outcome = _Outcome([NOT_DRAWN] * size, [None] * size, [0.0] * size)
        if size == 1:
            outcome.failed.append(self._failed_alone(rows[0], reason))
        else:
            self._forward_one_by_one(rows, outcome)
        return outcome

    def _forward_one_by_one(self, rows: Sequence[ScheduledRow], outcome: _Outcome) -> None:
        """Finds the rows that fail alone. Writing keys and values a second time changes nothing."""
        for place, row in enumerate(rows):
            try:
                self._forward([row], [place], outcome)
            except (RuntimeError, IndexError) as error:
                outcome.failed.append(self._failed_alone(row, _reason(error)))

    def _forward(self, rows: Sequence[ScheduledRow], places: Sequence[int], outcome: _Outcome) -> None:
        masks = [self._mask(row) for row in rows]  # computed on a thread while the forward runs
        computed = self._runner.run(rows)
        draws: dict[int, Draw] = {}  # by index of the row
        not_finite = {index for index, is_finite in enumerate(computed.finite) if not is_finite}
        for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            if row.samples and index not in not_finite:
                try:
                    draws[index] = self._draw(row, None if mask is None else mask.result())
                except ConstraintError:
                    outcome.failed.append(RowFailure(row.request_id, "grammar", poison=True))
        not_finite.update(self._sample(rows, computed.logits, draws, places, outcome))
        outcome.failed.extend(self._not_finite(rows[index]) for index in sorted(not_finite))

    def _mask(self, row: ScheduledRow) -> Future[bytes] | None:
        constraint = _rules(row).constraint
        if constraint is None or not row.samples:
            return None
        return self._grammars.submit(constraint.allowed, row.output_ids)

    def _sample(
        self,
        rows: Sequence[ScheduledRow],
        logits: Tensor,
        draws: dict[int, Draw],
        places: Sequence[int],
        outcome: _Outcome,
    ) -> list[int]:
        """Fills in the tokens of ``draws``; ``logits`` has a row for each of ``rows`` that samples.

        Returns the indexes of those whose logits are not finite.
        """
        if not draws:
            return []
        sampling = [index for index, row in enumerate(rows) if row.samples]
        kept = [rank for rank, index in enumerate(sampling) if index in draws]
        chosen = logits if len(kept) == len(sampling) else logits[kept]
        sampled = self._sampler.sample(chosen, list(draws.values()), with_margins=self.with_margins)
        for rank, index in enumerate(draws):
            outcome.token_ids[places[index]] = sampled.token_ids[rank]
            outcome.logprobs[places[index]] = sampled.logprobs[rank]
            if self.with_margins:
                outcome.margins[places[index]] = sampled.margins[rank]
        return [index for index, token_id in zip(draws, sampled.token_ids, strict=True) if token_id == NOT_DRAWN]

    def _not_finite(self, row: ScheduledRow) -> RowFailure:
        """The blocks just written are cleared, for their next owner."""
        self.cache.scrub(row.block_table[row.start // BLOCK_SIZE : blocks_of(row, BLOCK_SIZE)])
        return self._failure(row, "not_finite")

    def _failed_alone(self, row: ScheduledRow, reason: str) -> RowFailure:
        """Raises DeviceLost when even an addition fails: then no row is at fault."""
        try:
            self._probe()
        except RuntimeError as error:
            raise DeviceLost(f"the device is lost: {_first_line(error)}") from error
        return self._failure(row, reason)

    def _failure(self, row: ScheduledRow, reason: str) -> RowFailure:
        """A request that fails a second time, with nobody else to blame, is at fault itself."""
        again = row.request_id in self._failed_before
        self._failed_before.add(row.request_id)
        return RowFailure(row.request_id, reason, poison=again)

    def _probe(self) -> None:
        torch.ones(2, device=self.cache.device_pool.device).sum().item()

    def _draw(self, row: ScheduledRow, allowed: bytes | None) -> Draw:
        rules = _rules(row)
        stream = self._stream_of.get(row.request_id)
        if stream is None:
            stream = self._stream_of[row.request_id] = stream_of(rules.parameters, row.request_id)
        return Draw(rules, stream, row.output_ids, allowed)


def _rules(row: ScheduledRow) -> DrawRules:
    """What the loop gives; bare parameters will do, and a made-up row, as calibration has them, is greedy."""
    match row.sampling:
        case DrawRules() as rules:
            return rules
        case SamplingParameters() as parameters:
            return DrawRules(parameters)
        case _:
            return GREEDY


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _reason(error: Exception) -> str:
    text = str(error)
    short = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or "not enough memory" in text
    return "out_of_memory" if short else "kernel_error"
