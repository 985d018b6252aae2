"""What a step did: tokens, ends and failures.

Knows the result of one step; refuses to plan the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from scheduler_engine.charging import charge_step
from scheduler_engine.draft import Draft
from scheduler_engine.errors import Misuse
from scheduler_engine.events import FinishReason, StepEvents, TokenColumns
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.request import RequestId
from scheduler_engine.state import EngineState

_MAX_FAILURES = 3


def check_result(state: EngineState, plan: StepPlan, result: StepResult) -> None:
    """Raises Misuse, before anything is changed, unless ``result`` can be a result of ``plan``."""
    if result.step != plan.step:
        raise Misuse(f"result of step {result.step} for step {plan.step}")
    if result.duration_us < 0:
        raise Misuse(f"step {plan.step} lasted {result.duration_us} us")
    if len(result.sampled_token_ids) != plan.num_rows:
        raise Misuse(f"{len(result.sampled_token_ids)} sampled tokens for {plan.num_rows} rows")
    if len(set(result.completed_copies)) < len(result.completed_copies):
        raise Misuse(f"a copy of {result.completed_copies} is completed twice")
    for request_id in result.completed_copies:
        if request_id not in state.fences:
            raise Misuse(f"completed copy of {request_id}, which has none under way")
    if plan.num_rows and min(result.sampled_token_ids) < 0:
        failed = {failure.request_id for failure in result.failed}
        sampling = [*plan.decodes.request_ids, *(chunk.request_id if chunk.samples else None for chunk in plan.chunks)]
        for name, token_id in zip(sampling, result.sampled_token_ids, strict=True):
            if token_id < 0 and name is not None and name not in failed:
                raise Misuse(f"row of {name} neither sampled nor failed")


class Settlement:
    """Applies one result. Always: a quiet step touches its decodes only to append their tokens."""

    def __init__(self, state: EngineState, draft: Draft, plan: StepPlan, now_us: int) -> None:
        self._state = state
        self._draft = draft
        self._plan = plan
        self._now_us = now_us
        self._batch = state.running.batch()
        self._tokens = TokenColumns()
        self._filled: list[LiveRequest] = []

    def settle(self, result: StepResult) -> StepEvents:
        state, draft = self._state, self._draft
        for request_id in result.completed_copies:
            state.complete_copy(request_id)
        state.host.give(draft.host_blocks_after)
        charge_step(state, draft, result.duration_us, self._now_us)
        failed = {failure.request_id: failure for failure in result.failed}
        if self._plan.num_rows:
            state.peak.tick()
        num_decodes = len(self._plan.decodes)
        if num_decodes:
            self._advance_decodes(result.sampled_token_ids[:num_decodes], failed, result.stopped)
        if draft.chunks:
            self._advance_chunks(result.sampled_token_ids[num_decodes:], failed, result.stopped)
        return self._events()

    # tokens

    def _advance_decodes(
        self, sampled: Sequence[int], failed: Mapping[RequestId, RowFailure], stopped: Collection[RequestId]
    ) -> None:
        batch, running = self._batch, self._state.running
        request_ids: Sequence[RequestId] = batch.request_ids
        indexes, owners = self._plan.decodes.num_outputs, batch.owners
        failures = [live for live in owners if live.request_id in failed] if failed else []
        if failures:
            for live in failures:
                running.lose_step(live)
            kept = [place for place, live in enumerate(owners) if live.request_id not in failed]
            request_ids, indexes = [request_ids[place] for place in kept], [indexes[place] for place in kept]
            owners, sampled = tuple([owners[place] for place in kept]), [sampled[place] for place in kept]
            outputs = tuple([live.output_ids for live in owners])
        else:
            outputs = batch.outputs
        for output_ids, token_id in zip(outputs, sampled, strict=True):
            output_ids.append(token_id)
        self._tokens = TokenColumns(request_ids, indexes, sampled)
        due, self._filled = running.advance()
        if stopped or running.may_stop(sampled):
            for live, token_id in zip(owners, sampled, strict=True):
                self._stop(live, token_id, stopped)
        for live in due:
            if live.request_id in running.decoding[live.rank]:  # it may just have ended
                self._look_closer(live)
        for live in failures:
            self._fail(live, failed[live.request_id])

    def _advance_chunks(
        self, sampled: Sequence[int], failed: Mapping[RequestId, RowFailure], stopped: Collection[RequestId]
    ) -> None:
        request_ids: list[RequestId] = []
        indexes: list[int] = []
        token_ids: list[int] = []
        for (live, count), token_id in zip(self._draft.chunks, sampled, strict=True):
            failure = failed.get(live.request_id)
            if failure is not None:
                self._fail(live, failure)
            elif self._advance_chunk(live, count):
                request_ids.append(live.request_id)
                indexes.append(len(live.output_ids))
                token_ids.append(token_id)
                self._begin_decode(live, token_id, stopped)
        if token_ids:
            tokens = self._tokens
            self._tokens = TokenColumns(
                [*tokens.request_ids, *request_ids], [*tokens.indexes, *indexes], [*tokens.token_ids, *token_ids]
            )

    def _advance_chunk(self, live: LiveRequest, count: int) -> bool:
        """True when all that is known is computed now, so that a token was drawn."""
        end = live.computed + count
        live.recomputed_tokens += max(0, min(end, live.computed_high) - live.computed)
        live.computed = end
        live.computed_high = max(live.computed_high, end)
        self._state.publish_prefix(live)
        if live.computed_high == end:
            live.debtor = None
        live.num_steps_without_token += end < live.total
        return end == live.total

    def _begin_decode(self, live: LiveRequest, token_id: int, stopped: Collection[RequestId]) -> None:
        running = self._state.running
        running.remove(live)
        live.state = State.DECODE
        live.output_ids.append(token_id)
        running.add(live)
        if not self._stop(live, token_id, stopped):
            self._look_closer(live)

    def _stop(self, live: LiveRequest, token_id: int, stopped: Collection[RequestId]) -> bool:
        """Ends one whose new token, or the text it makes, says so."""
        is_enough = len(live.output_ids) >= live.request.min_tokens
        if not (live.request_id in stopped or (token_id in live.stop_ids and is_enough)):
            return False
        self._note_first_token(live)
        self._state.finish(live, FinishReason.STOP, self._now_us)
        return True

    def _look_closer(self, live: LiveRequest) -> None:
        """Limit and estimate of one that has just got a token."""
        state = self._state
        self._note_first_token(live)
        if live.total >= live.finish_total:
            state.finish(live, FinishReason.LENGTH, self._now_us)
            return
        if live.total >= live.estimated_total:
            state.peak.remove(live)
            state.estimate_total(live)
            state.peak.add(live)
        state.set_next_check(live)

    def _note_first_token(self, live: LiveRequest) -> None:
        if live.first_token_us is None:
            live.first_token_us = self._now_us

    def _fail(self, live: LiveRequest, failure: RowFailure) -> None:
        """Once more by recompute; a poisoned one, or one that fails again and again, ends."""
        live.num_steps_without_token += 1
        if failure.poison or live.failures + 1 >= _MAX_FAILURES:
            self._state.device.forget(live.block_table)
            self._state.finish(live, FinishReason.FAILED, self._now_us, failure.reason)
        else:
            self._state.fail_row(live, self._draft)

    def _events(self) -> StepEvents:
        outbox = self._state.outbox
        return StepEvents(
            step=self._plan.step,
            accepted=tuple(outbox.accepted),
            rejected=tuple(outbox.rejected),
            preempted=tuple(outbox.preempted),
            resumed=tuple(outbox.resumed),
            tokens=self._tokens,
            finished=tuple(outbox.finished),
            filled=tuple([live.request_id for live in self._filled if live.request_id in self._state.lives]),
        )
