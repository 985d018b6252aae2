"""What a step did: charges, tokens, ends and failures, in one pass over its rows.

Knows the result of one step; refuses to plan the next.
"""

from __future__ import annotations

from scheduler_engine.draft import Draft
from scheduler_engine.errors import Misuse
from scheduler_engine.events import FinishReason, StepEvents, TokenColumns
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from scheduler_engine.state import EngineState

_MAX_FAILURES = 3


def check_result(state: EngineState, plan: StepPlan, result: StepResult) -> None:
    """Raises Misuse, before anything is changed, unless ``result`` can be a result of ``plan``."""
    if result.step != plan.step:
        raise Misuse(f"result of step {result.step} for step {plan.step}")
    if result.duration_us < 0:
        raise Misuse(f"step {plan.step} lasted {result.duration_us} us")
    if len(result.sampled_token_ids) != len(plan.rows):
        raise Misuse(f"{len(result.sampled_token_ids)} sampled tokens for {len(plan.rows)} rows")
    for request_id in result.completed_copies:
        if request_id not in state.fences:
            raise Misuse(f"completed copy of {request_id}, which has none under way")
    if plan.rows and min(result.sampled_token_ids) < 0:
        failed = {failure.request_id for failure in result.failed}
        for row, token_id in zip(plan.rows, result.sampled_token_ids, strict=True):
            if row.samples and token_id < 0 and row.request_id not in failed:
                raise Misuse(f"row of {row.request_id} neither sampled nor failed")


class Settlement:
    """Applies one result. Always: each row is charged once, and the charges of a step sum to its duration."""

    def __init__(
        self, state: EngineState, draft: Draft, plan: StepPlan, owners: list[LiveRequest], now_us: int
    ) -> None:
        self._state = state
        self._draft = draft
        self._plan = plan
        self._owners = owners
        self._now_us = now_us
        self._tokens: tuple[list[RequestId], list[int], list[int]] = ([], [], [])

    def settle(self, result: StepResult) -> StepEvents:
        state, draft = self._state, self._draft
        for request_id in result.completed_copies:
            state.complete_copy(request_id)
        state.host.give(draft.host_blocks_after)
        self._charge(result.duration_us)
        failed = {failure.request_id: failure for failure in result.failed}
        if self._owners:
            state.peak.tick()
        self._advance(result, failed)
        return self._events()

    # charges

    def _charge(self, duration_us: int) -> None:
        """Split the step by predicted cost, each cumulative sum rounded once: the parts add up to the whole, exactly.

        Rows pay for themselves, except what they compute again because a higher class pushed them out: its tenant pays.
        """
        state = self._state
        num_decodes = len(self._owners) - len(self._draft.chunks)
        costs_ns = self._row_costs(num_decodes)
        copies_ns = sum(copy.cost_ns for copy in self._draft.copy_charges)
        total_ns = sum(costs_ns) + len(costs_ns) + copies_ns  # a nanosecond more per row, so that none is free
        if not total_ns:
            return
        served_us = [0 for _ in PriorityClass]
        sum_ns = paid_us = 0
        for live, row_ns in zip(self._owners, costs_ns, strict=True):
            sum_ns += row_ns + 1
            charge_us = duration_us * sum_ns // total_ns - paid_us
            paid_us += charge_us
            live.num_steps += 1
            live.gpu_us += charge_us
            account = live.account if live.debtor is None else live.debtor
            account.charge(charge_us)
            served_us[account.priority_class] += charge_us
        for account, cost_ns in self._draft.copy_charges:
            sum_ns += cost_ns
            charge_us = duration_us * sum_ns // total_ns - paid_us
            paid_us += charge_us
            account.charge(charge_us)
            served_us[account.priority_class] += charge_us
        state.accountant.busy_us += duration_us
        state.cost.observe(
            decode_ns=state.cost.base_ns + sum(costs_ns[:num_decodes]),
            prefill_ns=sum(costs_ns[num_decodes:]),
            copy_ns=copies_ns,
            duration_us=duration_us,
        )
        has_work = [state.has_work(rank) for rank in PriorityClass]
        state.floors.settle(state.classes, served_us=served_us, has_work=has_work, now_us=self._now_us)

    def _row_costs(self, num_decodes: int) -> list[int]:
        cost = self._state.cost
        row_ns, token_ns = cost.decode_ns(1_024, 0), cost.decode_ns(0, 1_024)  # per 1024, to round only once
        costs = [(row_ns + token_ns * live.total) >> 10 for live in self._owners[:num_decodes]]
        costs += [cost.prefill_ns(live.computed, count) for live, count in self._draft.chunks]
        return costs

    # tokens

    def _advance(self, result: StepResult, failed: dict[RequestId, RowFailure]) -> None:
        """Decodes first, then chunks, as ``rows_of`` laid them out. The common decode touches four fields and one
        compare.
        """
        state = self._state
        sampled, stopped = result.sampled_token_ids, result.stopped
        request_ids, indexes, token_ids = self._tokens
        decode_tokens = state.running.decode_tokens
        num_decodes = len(self._owners) - len(self._draft.chunks)
        for live, token_id in zip(self._owners[:num_decodes], sampled, strict=False):
            if failed and live.request_id in failed:
                self._fail(live, failed[live.request_id])
                continue
            request_id, output_ids = live.request_id, live.output_ids
            request_ids.append(request_id)
            indexes.append(len(output_ids))
            token_ids.append(token_id)
            output_ids.append(token_id)
            live.computed = computed = live.total
            live.total = computed + 1
            decode_tokens[live.rank] += 1
            if computed >= live.next_check or token_id in live.stop_ids or (stopped and request_id in stopped):
                self._look_closer(live, token_id, request_id in stopped)
        for i, (live, count) in enumerate(self._draft.chunks, start=num_decodes):
            failure = failed.get(live.request_id)
            if failure is not None:
                self._fail(live, failure)
            else:
                self._advance_chunk(live, count, sampled[i], live.request_id in stopped)

    def _advance_chunk(self, live: LiveRequest, count: int, token_id: int, is_stopped: bool) -> None:
        state = self._state
        end = live.computed + count
        live.recomputed_tokens += max(0, min(end, live.computed_high) - live.computed)
        live.computed = end
        live.computed_high = max(live.computed_high, end)
        if live.computed_high == end:
            live.debtor = None
        if end < live.total:
            return
        request_ids, indexes, token_ids = self._tokens
        request_ids.append(live.request_id)
        indexes.append(len(live.output_ids))
        token_ids.append(token_id)
        state.running.remove(live)
        live.state = State.DECODE
        live.output_ids.append(token_id)
        live.total += 1
        if live.first_token_us is None:
            live.first_token_us = self._now_us
        state.set_next_check(live)
        state.running.add(live, state.config.block_size)
        self._look_closer(live, token_id, is_stopped)

    def _look_closer(self, live: LiveRequest, token_id: int, is_stopped: bool) -> None:
        """Ends, block edges and estimates, for one that has just got a token."""
        state = self._state
        if live.first_token_us is None:
            live.first_token_us = self._now_us
        num_output = len(live.output_ids)
        if is_stopped or (token_id in live.stop_ids and num_output >= live.request.min_tokens):
            state.finish(live, FinishReason.STOP, self._now_us)
        elif live.total >= live.finish_total:
            state.finish(live, FinishReason.LENGTH, self._now_us)
        else:
            if live.computed == len(live.block_table) * state.config.block_size:
                state.running.at_block_edge[live.rank][live.request_id] = live
            if live.total >= live.estimated_total:
                state.peak.remove(live)
                state.estimate_total(live)
                state.peak.add(live)
            state.set_next_check(live)

    def _fail(self, live: LiveRequest, failure: RowFailure) -> None:
        """Once more by recompute; a poisoned one, or one that fails again and again, ends."""
        if failure.poison or live.failures + 1 >= _MAX_FAILURES:
            self._state.finish(live, FinishReason.FAILED, self._now_us, failure.reason)
        else:
            self._state.fail_row(live, self._draft)

    def _events(self) -> StepEvents:
        outbox = self._state.outbox
        request_ids, indexes, token_ids = self._tokens
        return StepEvents(
            step=self._plan.step,
            accepted=tuple(outbox.accepted),
            rejected=tuple(outbox.rejected),
            preempted=tuple(outbox.preempted),
            resumed=tuple(outbox.resumed),
            tokens=TokenColumns(request_ids, indexes, token_ids),
            finished=tuple(outbox.finished),
        )
