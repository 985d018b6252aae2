"""The beats of a plan, class by class: decodes and their growth, prefills in flight, new heads.

Knows the order of decisions; each rule it applies lives in a module of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from scheduler_engine import admission
from scheduler_engine.budget import StepBudget
from scheduler_engine.deadlines import is_late, must_be_relegated, relegate
from scheduler_engine.decoding import DecodePlanner
from scheduler_engine.draft import Chunk, Draft
from scheduler_engine.entry import dominates, is_loud
from scheduler_engine.events import RejectReason
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import RANKS, PriorityClass
from scheduler_engine.record import Cause
from scheduler_engine.room import Fit, Room
from scheduler_engine.state import EngineState

_MAX_BYPASS_TRIES = 4  # requests behind a blocked head that are tried per step


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    SHED = enum.auto()
    BLOCKED = enum.auto()
    KEPT_OUT = enum.auto()  # nobody else of its tenant in this step: what is left is for others
    STOP = enum.auto()  # nobody else of this class in this step


@dataclass(slots=True)
class _HeadPass:
    """The heads of one class in one step: who is blocked, and who was set aside to look behind it."""

    blocked: LiveRequest | None = None
    set_aside: list[LiveRequest] = field(default_factory=list)
    kept_out: list[Account] = field(default_factory=list)
    is_over: bool = False


def _prefill_key(live: LiveRequest) -> tuple[int, int, tuple[int, int, int, int]]:
    """Prefills in flight with a hard deadline first: nobody who comes later takes the time they counted on."""
    has_none = live.hard_deadline_us is None
    return (has_none, live.account.service if has_none else 0, live.order_key)


class StepPlanner:
    """Plans one step. Always: classes by rank; what a class has been given is not taken back in the same step."""

    def __init__(self, state: EngineState, draft: Draft, budget: StepBudget) -> None:
        self._state = state
        self._draft = draft
        self._budget = budget
        self._room = Room(state, draft, budget)
        self._quiet: Account | None = None  # a tenant below its share that this step brings nearer to a first token
        self._is_dominated = False  # one tenant has nearly all of the class, and prompts under way
        self._decodes = DecodePlanner(state, draft, budget, self._room)

    def plan(self) -> None:
        for rank in RANKS:
            self._decodes.plan(rank)
            self._plan_prefills(rank)
            self._guard_first_token(rank)
        if not self._budget.num_tokens and not self._state.fences and not self._draft.swap_out:
            self._decodes.unblock()
            self._wake_a_held_one()

    def _wake_a_held_one(self) -> None:
        """Where nobody runs, the memory that a head waits for comes free only by the end of those who hold it: one of
        them goes on, whatever its tenant has had.
        """
        state, room = self._state, self._room
        if state.running.num_slots_used:
            return
        held = [live for rank in RANKS for live in state.running.held[rank].values()]
        fitting = [live for live in held if room.blocks_needed(live) <= state.device.num_free]
        if fitting:
            live = min(fitting, key=lambda live: (live.rank, live.order_key))
            is_decode = live.rest == 1 and live.computed > 0
            self._start(live, 1 if is_decode else self._chunk(live), is_decode=is_decode)

    def _plan_prefills(self, rank: int) -> None:
        """Prefills in flight and new heads of one class, the tenant served least first."""
        state, draft = self._state, self._draft
        self._quiet, self._is_dominated = None, False
        if not state.running.prefilling[rank] and not state.queues[rank].num_waiting:
            return
        heads = _HeadPass()
        in_flight = sorted(state.running.prefilling[rank].values(), key=_prefill_key)
        self._is_dominated = any(dominates(state, live) for live in in_flight)
        for live in in_flight:
            if live.hard_deadline_us is None:
                self._admit_heads(rank, heads, below_service=live.account.service)
            if live.request_id in state.running.prefilling[rank]:
                self._grant_chunk(live)
        self._admit_heads(rank, heads, below_service=None)
        for live in heads.set_aside:
            state.queues[rank].push(live)
        for account in heads.kept_out:
            state.queues[rank].relist(account)
        if draft.first_token_by is None and state.classes[rank].ttft_target_ms is not None:
            draft.first_token_by = next((chunk.live for chunk in draft.chunks if chunk.live.rank == rank), None)

    def _grant_chunk(self, live: LiveRequest) -> None:
        journal = self._state.journal
        if self._draft.holding[live.rank]:
            journal.starved(live, Cause.STEP_TIME)
            return
        if live.rank == PriorityClass.BATCH and self._state.overload.is_suspended and self._budget.num_tokens:
            journal.starved(live, Cause.POLICY_PAUSE)
            return
        count = self._chunk(live)
        if count:
            self._grant_prefill(live, count)
            journal.served(live)
        else:
            journal.starved(live, Cause.STEP_BUDGET)

    def _chunk(self, live: LiveRequest) -> int:
        """Prefill tokens that this step has for it. Where the first token of a quiet tenant is on its way, one that
        runs more and has been given no less does not make the step longer.
        """
        quiet = self._quiet
        if quiet is not None and is_loud(self._state, live) and live.account.service >= quiet.service:
            return 0
        is_considerate = self._is_dominated or dominates(self._state, live)
        return self._budget.chunk(live.rank, start=live.computed, rest=live.rest, is_considerate=is_considerate)

    def _grant_prefill(self, live: LiveRequest, count: int) -> None:
        self._budget.grant_prefill(live.rank, start=live.computed, count=count)
        self._draft.chunks.append(Chunk(live, count))
        live.granted_step = self._draft.step
        if self._quiet is None and not is_loud(self._state, live):
            self._quiet = live.account

    def _admit_heads(self, rank: int, heads: _HeadPass, *, below_service: int | None) -> None:
        """Let in heads of tenants served less than ``below_service``, fairest first.

        The first that does not fit is passed by those behind it that do, a bounded number of times, and never by a
        tenant that had more than the fairness gap beyond its own. One that is kept out, so that others find room, is
        passed by as many as find it.
        """
        queue = self._state.queues[rank]
        if not heads.is_over and self._room.is_at_rest(rank):
            self._keep_head(rank)
            heads.is_over = True
        while not heads.is_over and (live := queue.head()) is not None:
            if below_service is not None and live.account.service >= below_service:
                return
            if not self._may_pass(live, heads):
                heads.is_over = True
                return
            if must_be_relegated(self._state, live):
                relegate(self._state, live)
                continue
            self._note(heads, live, self._try(live, heads.blocked))

    def _note(self, heads: _HeadPass, live: LiveRequest, verdict: _Verdict) -> None:
        """What became of a head, for those behind it."""
        state, blocked = self._state, heads.blocked
        queue = state.queues[live.rank]
        match verdict:
            case _Verdict.STOP:
                heads.is_over = True
            case _Verdict.ADMITTED if blocked is not None:
                blocked.bypasses += 1
                state.tally.num_bypasses += 1
                state.journal.bypassed(blocked, live)
            case _Verdict.KEPT_OUT:
                queue.unlist(live.account)
                heads.kept_out.append(live.account)
            case _Verdict.BLOCKED:
                heads.blocked = blocked or live
                heads.is_over = len(heads.set_aside) == _MAX_BYPASS_TRIES or not self._room.has_slot(live.rank)
                if not heads.is_over:
                    queue.remove(live)
                    heads.set_aside.append(live)

    def _keep_head(self, rank: int) -> None:
        """A class at rest keeps the head it had: who has had less by now matters when somebody can start."""
        head = self._state.queues[rank].last_head() or self._state.queues[rank].head()
        if head is not None:
            self._state.borrow_prefix(head)
            self._room.wait_for_slot(head)
            self._state.return_prefix(head)

    def _may_pass(self, live: LiveRequest, heads: _HeadPass) -> bool:
        blocked, gap = heads.blocked, self._state.service_gap(live.rank)
        if blocked is not None and blocked.bypasses >= self._state.classes[blocked.rank].bypass_limit:
            return False
        passed = [*heads.kept_out, *(() if blocked is None else (blocked.account,))]
        return all(live.account.service <= account.service + gap for account in passed)

    def _try(self, live: LiveRequest, blocked: LiveRequest | None) -> _Verdict:
        self._state.borrow_prefix(live)
        verdict = self._judge(live, blocked)
        if verdict is not _Verdict.ADMITTED:
            self._state.return_prefix(live)
        return verdict

    def _judge(self, live: LiveRequest, blocked: LiveRequest | None) -> _Verdict:
        state, draft = self._state, self._draft
        rank = live.rank
        if live.suspended_step == draft.step or self._draft.holding[rank]:
            state.journal.stopped(live, Cause.STEP_TIME if draft.holding[rank] else Cause.STEP_UNDER_WAY, draft)
            return _Verdict.STOP
        cause = self._why_none(live)
        if cause is not None:
            state.journal.stopped(live, cause, draft)
            return _Verdict.STOP
        if live.state is State.ON_HOST and 0 <= draft.lowest_swapped_rank <= rank:
            state.journal.stopped(live, Cause.COPY_TURN, draft)
            return _Verdict.STOP  # no copy in beside a copy out, except for a higher class
        is_decode = live.rest == 1 and live.computed > 0
        count = 1 if is_decode else self._chunk(live)
        if not count or (is_decode and not self._decode_fits(live)):
            self._room.earmark(live)
            state.journal.stopped(live, Cause.STEP_BUDGET, draft)
            return _Verdict.STOP
        if is_late(state, live, count=count, granted_ns=self._budget.spent_ns):
            admission.note_wait(state, live, draft.now_us)
            state.reject(live, RejectReason.LATE, admission.retry_after_us(state, live), draft.now_us)
            return _Verdict.SHED
        fit = self._room.make(live, blocked)
        if fit is not Fit.STARTS:
            return _Verdict.KEPT_OUT if fit is Fit.KEPT_OUT else _Verdict.BLOCKED
        self._start(live, count, is_decode=is_decode)
        return _Verdict.ADMITTED

    def _start(self, live: LiveRequest, count: int, *, is_decode: bool) -> None:
        """Into a slot, with its first ``count`` tokens in this step."""
        state, draft = self._state, self._draft
        num_copied = live.num_to_copy_in
        admission.note_start(state, live, draft.now_us)
        state.start(live, draft, num_blocks=self._room.blocks_needed(live))
        if num_copied:
            self._budget.grant_copies(state.cost.copy_ns(num_copied))
        if is_decode:
            self._budget.grant_decodes(1, live.total)
        else:
            self._grant_prefill(live, count)

    def _why_none(self, live: LiveRequest) -> Cause | None:
        """Why nobody of the class may start in this step, whatever is free; never in a step that would be empty."""
        state, rank = self._state, live.rank
        if not self._budget.num_tokens:
            return None
        if rank == PriorityClass.BATCH and state.overload.is_paused:
            return Cause.POLICY_PAUSE
        if state.governor.is_full(rank, state.running.num_in_slots(rank)):
            return Cause.GOVERNOR
        return Cause.RESTING if self._room.must_rest(live) else None

    def _decode_fits(self, live: LiveRequest) -> bool:
        cost = self._state.cost
        needed_ns = cost.decode_ns(1, live.total) + cost.copy_ns(live.num_to_copy_in)
        is_first = not self._budget.num_tokens
        return is_first or needed_ns <= self._budget.decode_room_ns(live.rank)

    def _guard_first_token(self, rank: int) -> None:
        """A prefill that promises a first token makes this step; while that is cheap, the lower classes sit it out."""
        head = self._draft.first_token_by
        if head is None or head.rank != rank or not self._budget.first_token_hold_allowed:
            return
        self._budget.guard_first_token()
        self._draft.first_token_hold = any(self._state.has_work(lower) for lower in range(rank + 1, len(PriorityClass)))
