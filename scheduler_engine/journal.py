"""The engine's memory of its decisions: what a decision site calls, in one line, once it has decided.

Knows how a decision becomes a record, a wait and a link of the digest chain; decides nothing and changes nothing else.
A step in which nothing was decided costs one hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from scheduler_engine.chain import DigestChain
from scheduler_engine.cost import to_us
from scheduler_engine.events import FinishReason, Lever, RejectReason, Resource
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import RANKS, PriorityClass
from scheduler_engine.record import (
    MOST,
    NO_COSTS,
    NOT_OPEN,
    Action,
    Cause,
    LeverCosts,
    RecordRing,
    lever_code,
    outcome_code,
    pack,
    resource_code,
)
from scheduler_engine.request import Request, RequestId
from scheduler_engine.waits import WaitBook, WaitLog, share_key

if TYPE_CHECKING:
    from scheduler_engine.draft import Draft
    from scheduler_engine.state import EngineState

NUM_RECORDS = 32_768
NUM_ENDED = 4_096
_OF_THE_STEP = (Cause.STEP_BUDGET, Cause.STEP_TIME)


class Ended(NamedTuple):
    """What is remembered of a request that has ended. ``outcome`` is the value of its RejectReason or FinishReason."""

    request_id: RequestId
    tenant_id: str
    priority_class: PriorityClass
    outcome: str
    arrival_us: int
    first_start_us: int | None
    first_token_us: int | None
    ended_us: int
    log: WaitLog


class Journal:
    """Always: a request's newest record leads to those before it that the ring still holds, and the waits of a request
    sum to the time in which it did not run.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.now_us = 0  # of the plan, or of the result that is being applied
        self.waits = WaitBook()
        self.ring = RecordRing(NUM_RECORDS)
        self.ended: OrderedDict[RequestId, Ended] = OrderedDict()
        self.chain = DigestChain()
        self.step_records = b""  # of the step applied last
        self._pending: list[bytes] = []
        self._blamed_step = [-1 for _ in RANKS]
        self._num_held = [0 for _ in RANKS]  # decodes that began to sit out in this step
        self._soonest_end: tuple[int, int] = (-1, 0)  # step -> microseconds until a running request is sure to end

    # the step

    def close_plan(self, draft: Draft, *, token_budget: int, wake_at_us: int | None) -> None:
        state = self._state
        for queue in state.queues:
            if queue.line_changes:
                self._note_lines(queue.line_changes)
        for rank, num_held in enumerate(self._num_held) if any(self._num_held) else ():
            if num_held:
                by = draft.first_token_by
                self._write(
                    None,
                    Action.HELD,
                    rank=rank,
                    other=0 if by is None else by.sequence_number,
                    need=(num_held, 0),
                )
                self._num_held[rank] = 0
        self.chain.note_plan(state, draft, token_budget=token_budget, wake_at_us=wake_at_us)

    def close_step(self, step: int, duration_us: int) -> None:
        self.step_records = b"".join(self._pending)
        self._pending.clear()
        self.chain.close_step(step, duration_us, self.now_us, self.step_records)

    def _note_lines(self, changes: list[tuple[Account, bool]]) -> None:
        for account, is_parked in changes:
            if is_parked:
                self.waits.park(account, self.now_us)
            else:
                self.waits.unpark(account, self.now_us)
        changes.clear()

    # arrivals and ends

    def refused(self, request: Request, reason: RejectReason, arrival_us: int) -> None:
        log = WaitLog()
        self._note_arrival(log, arrival_us)
        self._write(None, Action.REFUSED, rank=int(request.priority_class), outcome=outcome_code(reason), log=log)
        key = (request.request_id, request.tenant_id, request.priority_class)
        self._remember(Ended(*key, reason.value, arrival_us, None, None, self.now_us, log))

    def queued(self, live: LiveRequest) -> None:
        self._note_arrival(live.waits, live.arrival_us)
        self._write(live, Action.QUEUED)
        self.waits.begin(live.account, live.waits, self.now_us)

    def _note_arrival(self, log: WaitLog, arrival_us: int) -> None:
        if self.now_us != arrival_us:
            log.add(share_key(Cause.STEP_UNDER_WAY, 0), self.now_us - arrival_us)

    def ended_as(self, live: LiveRequest, reason: FinishReason | RejectReason) -> None:
        """Finished, cancelled, failed or shed."""
        log = live.waits
        self.waits.end(live.account, log, self.now_us)
        self.waits.busy(log, self.now_us)
        action = Action.SHED if isinstance(reason, RejectReason) else Action.FINISHED
        self._write(live, action, outcome=outcome_code(reason))
        key = (live.request_id, live.account.tenant_id, live.request.priority_class)
        firsts = (live.first_start_us, live.first_token_us)
        self._remember(Ended(*key, reason.value, live.arrival_us, *firsts, self.now_us, log))

    def _remember(self, ended: Ended) -> None:
        self.ended[ended.request_id] = ended
        self.ended.move_to_end(ended.request_id)
        if len(self.ended) > NUM_ENDED:
            self.ended.popitem(last=False)

    # into a slot and out of it

    def started(self, live: LiveRequest, *, is_first: bool) -> None:
        self.waits.end(live.account, live.waits, self.now_us)
        live.waits.has_started = True
        self._write(live, Action.ADMITTED if is_first else Action.RESUMED)

    def bypassed(self, blocked: LiveRequest, by: LiveRequest) -> None:
        self._write(blocked, Action.BYPASSED, other=by.sequence_number)

    def preempted(
        self, live: LiveRequest, lever: Lever, resource: Resource, by: LiveRequest | None, costs: LeverCosts
    ) -> None:
        """Call it once the state is the new one, before the request is put into line."""
        log = live.waits
        self.waits.busy(log, self.now_us)
        self.waits.end(live.account, log, self.now_us)  # one that was held goes further out
        self._write(
            live,
            Action.PREEMPTED,
            resource=resource_code(resource),
            lever=lever_code(lever),
            holder=0 if by is None else 1 + by.rank,
            other=0 if by is None else by.sequence_number,
            costs=costs,
        )
        if live.state is State.SAVING:
            self.waits.idle(log, share_key(Cause.SAVING, 0), self.now_us)
        else:
            self.waits.begin(live.account, log, self.now_us)

    def saved(self, live: LiveRequest) -> None:
        self.waits.busy(live.waits, self.now_us)
        self._write(live, Action.SAVED)
        self.waits.begin(live.account, live.waits, self.now_us)

    def lever_costs(self, live: LiveRequest, lever: Lever) -> LeverCosts:
        """As ``preemption.cheapest_lever`` sees them: ask before anything is given up."""
        state = self._state
        num_blocks = state.config.num_blocks_for(live.computed)
        can_swap = num_blocks <= state.host_room
        num_dirty = num_blocks - len(live.host_blocks)
        swap_us = to_us(state.cost.copy_ns(num_dirty)) + to_us(state.cost.copy_ns(num_blocks))
        recompute_us = to_us(state.cost.prefill_ns(0, live.computed))
        return LeverCosts(
            hold_us=0 if lever is Lever.HOLD else NOT_OPEN,
            swap_us=min(NOT_OPEN, swap_us) if can_swap else NOT_OPEN,
            recompute_us=NOT_OPEN if live.request.reproducible else min(NOT_OPEN, recompute_us),
            wait_us=min(NOT_OPEN, self._soonest_end_us()),
        )

    def _soonest_end_us(self) -> int:
        """The lever *wait*: when the first decode is sure to end by itself. O(decodes), once per preempting step."""
        state = self._state
        step, wait_us = self._soonest_end
        if step != state.step:
            left = [live.finish_total - live.total for members in state.running.decoding for live in members.values()]
            wait_us = max(1, min(left)) * state.cost.step_us if left else NOT_OPEN
            self._soonest_end = (state.step, wait_us)
        return wait_us

    # the head of a class that does not start; nobody else of the class counts in that step

    def stopped(self, live: LiveRequest, cause: Cause, draft: Draft) -> None:
        """For want of a part of the step."""
        if self._is_news(live, cause):
            holder = self._step_holder(live.rank, draft) if cause in _OF_THE_STEP else 0
            self._block(live, cause, holder, (0, 0))

    def blocked(self, live: LiveRequest, cause: Cause, need: tuple[int, int]) -> None:
        """For want of slots or blocks (``need``)."""
        if self._is_news(live, cause):
            self._block(live, cause, self._room_holder(cause), need)

    def _is_news(self, live: LiveRequest, cause: Cause) -> bool:
        rank, step = live.rank, self._state.step
        if self._blamed_step[rank] == step:
            return False
        self._blamed_step[rank] = step
        return not self.waits.is_blamed(rank, live.waits, cause)

    def _block(self, live: LiveRequest, cause: Cause, holder: int, need: tuple[int, int]) -> None:
        self.waits.block(live.account, live.waits, share_key(cause, holder), self.now_us)
        self._write(live, Action.BLOCKED, cause=cause, holder=holder, need=(need[0], need[1]))

    def _room_holder(self, cause: Cause) -> int:
        """1 + rank of the class that has most of what is short, 0 where that means nothing."""
        running = self._state.running
        if cause is Cause.SLOTS:
            return _largest([running.num_in_slots(rank) for rank in RANKS])
        if cause not in (Cause.MEMORY, Cause.HEADROOM, Cause.PATIENCE):
            return 0
        tokens = list(running.decode_tokens)
        for rank in RANKS:
            tokens[rank] += sum(live.total for live in running.prefilling[rank].values())
            tokens[rank] += sum(live.total for live in running.held[rank].values())
        return _largest(tokens)

    def _step_holder(self, rank: int, draft: Draft) -> int:
        """1 + rank of the class whose promise binds the step, else of the one with the largest part of it."""
        if draft.first_token_by is not None and draft.first_token_by.rank < rank:
            return 1 + draft.first_token_by.rank
        cost, running = self._state.cost, self._state.running
        parts_ns = [cost.decode_ns(len(running.decoding[rank]), running.decode_tokens[rank]) for rank in RANKS]
        for chunk in draft.chunks:
            parts_ns[chunk.live.rank] += cost.prefill_ns(chunk.live.computed, chunk.num_tokens)
        return _largest(parts_ns)

    # in a slot, without a part of the step

    def held(self, rank: int, lives: Sequence[LiveRequest], by: LiveRequest | None) -> None:
        """Decodes of a class begin to sit steps out for a promise above them."""
        self._num_held[rank] += len(lives)
        key = share_key(Cause.STEP_TIME, 0 if by is None else 1 + by.rank)
        for live in lives:
            self.waits.idle(live.waits, key, self.now_us)

    def starved(self, live: LiveRequest, cause: Cause) -> None:
        """It keeps its slot and gets nothing in this step: no block to grow into, or no room in the step."""
        if live.waits.idle_since_us is None:
            self.waits.idle(live.waits, share_key(cause, self._room_holder(cause)), self.now_us)

    def served(self, live: LiveRequest) -> None:
        """It gets its part of a step (again)."""
        if live.waits.idle_since_us is not None:
            self.waits.busy(live.waits, self.now_us)

    # records

    def _write(
        self,
        live: LiveRequest | None,
        action: Action,
        *,
        rank: int = 0,
        cause: int = 0,
        outcome: int = 0,
        resource: int = 0,
        lever: int = 0,
        holder: int = 0,
        other: int = 0,
        costs: LeverCosts = NO_COSTS,
        need: tuple[int, int] = (0, 0),
        log: WaitLog | None = None,
    ) -> None:
        """About a request, a class as a whole (no ``log``), or one that was refused and has no number."""
        state, now_us = self._state, self.now_us
        previous = sequence_number = slack_us = service = 0
        if live is not None:
            rank, log, sequence_number = live.rank, live.waits, live.sequence_number
            slack_us, service = live.deadline_us - now_us, live.account.service
            previous = log.last_record
        body = pack(
            state.step,
            now_us,
            sequence_number,
            other,
            previous,
            action,
            cause,
            outcome,
            resource,
            lever,
            rank,
            holder,
            0,
            state.cost.version & NOT_OPEN,
            *costs,
            *need,
            state.device.num_free,
            slack_us,
            service if service < MOST else MOST,
        )
        self._pending.append(body)
        number = self.ring.append(body)
        if log is not None:
            log.last_record = number


def _largest(parts: Sequence[int]) -> int:
    """1 + index of the largest, 0 when there is nothing."""
    most = max(parts)
    return 1 + parts.index(most) if most > 0 else 0
