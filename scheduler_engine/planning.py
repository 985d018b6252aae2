"""The beats of a plan, class by class: decodes and their growth, prefills in flight, new heads and who must give way.

Knows the order of decisions; each rule it applies lives in a module of its own.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from scheduler_engine import admission
from scheduler_engine.budget import StepBudget
from scheduler_engine.draft import Chunk, Draft
from scheduler_engine.events import Lever, Preempted, RejectReason, Resource
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.policy import PriorityClass
from scheduler_engine.preemption import (
    Need,
    Victim,
    choose_victims,
    lower_classes,
    overserved_tenants,
    steps_until_free,
)
from scheduler_engine.state import EngineState

_MAX_BYPASS_TRIES = 4  # requests behind a blocked head that are tried per step
_NOTHING = Need(0, 0)


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    SHED = enum.auto()
    BLOCKED = enum.auto()
    STOP = enum.auto()  # nobody else of this class in this step


class Earmark(NamedTuple):
    """What a blocked head waits for. Newcomers and growth of lower classes see only what lies outside it."""

    head: LiveRequest
    need: Need
    binds_own_class: bool  # what was pushed out for it is still being copied: nobody slips in before it
    binds_all: bool  # its class is owed its floor: newcomers of every class leave it what comes free


class StepPlanner:
    """Plans one step. Always: classes in order of rank; what a class has been given is never taken back in the same step."""

    def __init__(self, state: EngineState, draft: Draft, budget: StepBudget) -> None:
        self._state = state
        self._draft = draft
        self._budget = budget
        self._earmarks: list[Earmark] = []
        self._holding = [False for _ in PriorityClass]
        owed = state.owed_head
        if owed is not None and state.floors.in_debt(owed.rank, draft.now_us) and state.is_queued(owed):
            need = Need(1, self._blocks_needed(owed))
            self._earmarks.append(Earmark(owed, need, binds_own_class=False, binds_all=True))
        state.owed_head = None

    def plan(self) -> None:
        for rank in PriorityClass:
            self._plan_decodes(rank)
            self._plan_prefills(rank)
            self._guard_first_token(rank)

    # decodes

    def _plan_decodes(self, rank: int) -> None:
        if not self._state.running.decoding[rank]:
            return
        self._hold_for_step_time(rank)
        self._grow(rank)
        running = self._state.running
        num_rows, tokens = len(running.decoding[rank]), running.decode_tokens[rank]
        if self._draft.num_idle:
            idle = [live for live in running.decoding[rank].values() if live.idle_step == self._draft.step]
            num_rows -= len(idle)
            tokens -= sum(live.total for live in idle)
        self._budget.grant_decodes(num_rows, tokens)

    def _hold_for_step_time(self, rank: int) -> None:
        """Lever 0: decodes that do not fit under the promises of the classes above keep slot and KV and sit this step out.

        The longest running ones go on, so that whoever is held is held for a bounded time.
        """
        running, constants = self._state.running, self._state.cost.constants
        members = running.decoding[rank]
        room_ns = self._budget.decode_room_ns(rank)
        all_ns = len(members) * constants.decode_row_ns + running.decode_tokens[rank] * constants.kv_token_ns
        held_before = running.step_held[rank]
        if all_ns <= room_ns:
            for live in held_before.values():
                self._state.outbox.resumed.append(live.request_id)
            held_before.clear()
            return
        self._holding[rank] = True
        keeps_one = self._budget.num_tokens == 0 and not self._draft.chunks
        for live in members.values():
            room_ns -= constants.decode_row_ns + live.total * constants.kv_token_ns
            if room_ns >= 0 or keeps_one:
                keeps_one = False
                if held_before.pop(live.request_id, None) is not None:
                    self._state.outbox.resumed.append(live.request_id)
                continue
            self._sit_out(live)
            if live.request_id not in held_before:
                self._note_hold(live)

    def _sit_out(self, live: LiveRequest) -> None:
        live.idle_step = self._draft.step
        self._draft.num_idle += 1

    def _note_hold(self, live: LiveRequest) -> None:
        by = self._draft.first_token_by
        live.num_holds += 1
        self._state.running.step_held[live.rank][live.request_id] = live
        self._state.outbox.preempted.append(
            Preempted(live.request_id, Lever.HOLD, Resource.STEP_TIME, None if by is None else by.request_id)
        )

    def _grow(self, rank: int) -> None:
        """Decodes at a block edge get their block; who must give way for it is settled before any block is taken."""
        needy = self._needy(rank)
        if not needy:
            return
        while len(needy) > self._blocks_to_grow(rank):
            short = len(needy) - self._blocks_to_grow(rank)
            if not self._give_way_for_growth(rank, needy[0], short):
                break
            needy = self._needy(rank)
        num_served = min(len(needy), self._blocks_to_grow(rank))
        edge = self._state.running.at_block_edge[rank]
        for live in needy[:num_served]:
            live.block_table.append(self._state.device.take_one())
            del edge[live.request_id]
            self._state.set_next_check(live)
        for live in needy[num_served:]:
            self._sit_out(live)

    def _needy(self, rank: int) -> list[LiveRequest]:
        step = self._draft.step
        return [live for live in self._state.running.at_block_edge[rank].values() if live.idle_step != step]

    def _give_way_for_growth(self, rank: int, first: LiveRequest, short: int) -> bool:
        """Push out somebody so that decodes of the class may grow. False when they must wait instead."""
        state = self._state
        if None in state.fences.values():
            return False  # blocks are already on their way
        need = Need(0, short)
        victims = choose_victims(state, need, lower_classes(state, rank))
        if victims is not None:
            self._push_out(victims, Resource.MEMORY, first)
            return not state.fences
        # its own class: the tenant that had most, then the latest promise; a needy one may have to give way itself
        members = [live for live in state.running.on_device(rank) if live.started_step != self._draft.step]
        if len(members) <= 1:
            return False
        oldest = min(members, key=lambda live: live.order_key)
        members.remove(oldest)
        worst_service = max(live.account.service for live in members)
        candidates = [live for live in members if live.account.service == worst_service]
        one = Need(0, 1)
        victims = choose_victims(state, one, candidates) or choose_victims(
            state, one, members, reproducible_may_drop=True
        )
        if victims is None:
            return False
        self._push_out(victims, Resource.MEMORY, None)
        return not state.fences

    # prefills and admission

    def _plan_prefills(self, rank: int) -> None:
        state, draft = self._state, self._draft
        set_aside: list[LiveRequest] = []
        in_flight = sorted(
            state.running.prefilling[rank].values(), key=lambda live: (live.account.service, live.order_key)
        )
        may_admit = True
        for live in in_flight:
            if may_admit:
                may_admit = self._admit_heads(rank, set_aside, below_service=live.account.service)
            if live.request_id in state.running.prefilling[rank]:
                self._grant_chunk(live)
        if may_admit:
            self._admit_heads(rank, set_aside, below_service=None)
        for live in set_aside:
            state.queues[rank].push(live)
        if draft.first_token_by is None and state.classes[rank].ttft_target_ms is not None:
            draft.first_token_by = next((chunk.live for chunk in draft.chunks if chunk.live.rank == rank), None)

    def _grant_chunk(self, live: LiveRequest) -> None:
        if self._holding[live.rank]:
            return
        count = self._budget.chunk(live.rank, start=live.computed, rest=live.rest)
        if count:
            self._budget.grant_prefill(live.rank, start=live.computed, count=count)
            self._draft.chunks.append(Chunk(live, count))

    def _admit_heads(self, rank: int, set_aside: list[LiveRequest], *, below_service: int | None) -> bool:
        """Let in heads of tenants served less than ``below_service``, fairest first. False when the class is done for this step."""
        queue = self._state.queues[rank]
        blocked: LiveRequest | None = None
        num_tries = 0
        while (live := queue.head()) is not None:
            if below_service is not None and live.account.service >= below_service:
                return True
            verdict = self._try(live, blocked)
            if verdict is _Verdict.STOP:
                return False
            if verdict is _Verdict.ADMITTED and blocked is not None:
                blocked.bypasses += 1
            if verdict is not _Verdict.BLOCKED:
                continue
            queue.remove(live)
            set_aside.append(live)
            if blocked is None:
                blocked = live
            num_tries += 1
            if num_tries > _MAX_BYPASS_TRIES or blocked.bypasses >= self._state.classes[rank].bypass_limit:
                return False
        return True

    def _try(self, live: LiveRequest, blocked: LiveRequest | None) -> _Verdict:
        state, draft = self._state, self._draft
        rank = live.rank
        if live.suspended_step == draft.step or self._holding[rank]:
            return _Verdict.STOP
        if live.state is State.ON_HOST and 0 <= draft.lowest_swapped_rank <= rank:
            return _Verdict.STOP  # no copy in beside a copy out, except for a higher class
        is_decode = live.rest == 1 and live.computed > 0
        count = 1 if is_decode else self._budget.chunk(rank, start=live.computed, rest=live.rest)
        if not count or (is_decode and not self._decode_fits(live)):
            self._earmark(live)
            return _Verdict.STOP
        if admission.is_late(state, live, count=count, granted_ns=self._budget.spent_ns):
            state.reject(live, RejectReason.LATE, admission.retry_after_us(state, live), draft.now_us)
            return _Verdict.SHED
        if not self._make_room(live, blocked):
            return _Verdict.BLOCKED
        num_blocks = self._blocks_needed(live)
        num_copied = len(live.host_blocks)
        admission.note_start(state, live, draft.now_us)
        state.start(live, draft, num_blocks=num_blocks)
        if num_copied:
            self._budget.grant_copies(state.cost.copy_ns(num_copied))
        if is_decode:
            self._budget.grant_decodes(1, live.total)
        else:
            self._budget.grant_prefill(rank, start=live.computed, count=count)
            draft.chunks.append(Chunk(live, count))
        return _Verdict.ADMITTED

    def _decode_fits(self, live: LiveRequest) -> bool:
        constants = self._state.cost.constants
        needed_ns = constants.decode_row_ns + constants.kv_token_ns * live.total
        needed_ns += self._state.cost.copy_ns(len(live.host_blocks))
        is_first = not self._budget.num_tokens
        return is_first or needed_ns <= self._budget.decode_room_ns(live.rank)

    # room

    def _blocks_needed(self, live: LiveRequest) -> int:
        """The whole of what is known must fit: nobody is let in to be pushed out by its next chunk."""
        return max(0, self._state.config.num_blocks_for(live.total) - len(live.block_table))

    def _marked(self, rank: int, but: LiveRequest | None) -> Need:
        """What earmarks keep from a newcomer of the class."""
        slots = blocks = 0
        for mark in self._earmarks:
            own = mark.head.rank == rank and mark.binds_own_class
            if mark.head is not but and (mark.head.rank < rank or own or mark.binds_all):
                slots += mark.need.slots
                blocks += mark.need.blocks
        return Need(slots, blocks)

    def _blocks_to_grow(self, rank: int) -> int:
        """Free blocks that decodes of the class may take: all but what heads of higher classes wait for."""
        marked = sum(mark.need.blocks for mark in self._earmarks if mark.head.rank < rank)
        return max(0, self._state.device.num_free - marked)

    def _shortage(self, live: LiveRequest) -> Need:
        """What is missing for a start now. A held request is bound by no earmark: running on is how its blocks come free."""
        state = self._state
        marked = _NOTHING if live.state is State.HELD else self._marked(live.rank, live)
        slots = state.running.num_slots_used + 1 + marked.slots - state.slot_cap(live.rank)
        blocks = self._blocks_needed(live) + marked.blocks - state.device.num_free
        return Need(max(0, slots), max(0, blocks))

    def _peak_fits(self, live: LiveRequest) -> bool:
        state = self._state
        if live.state is State.HELD:
            return True  # it is part of the peak already
        state.estimate_total(live)
        peak = state.peak.peak_blocks(live.rank, have=live.total, remaining=live.estimated_total - live.total)
        return peak <= state.memory_cap(live) or not any(True for _ in state.running)

    def _make_room(self, live: LiveRequest, blocked: LiveRequest | None) -> bool:
        """True when the request may start now. May push out others for it, all or nothing."""
        state = self._state
        need = self._shortage(live)
        peak_fits = self._peak_fits(live)
        if need == _NOTHING and peak_fits:
            return True
        if blocked is None:  # only the head of the class may push out others
            victims = self._victims_for(live, need) if peak_fits else None
            if victims is not None:
                self._push_out_for(live, victims, need)
                if self._shortage(live) == _NOTHING:
                    return True
            if live.blocked_since_us is None:
                live.blocked_since_us = self._draft.now_us
            if state.floors.in_debt(live.rank, self._draft.now_us):
                state.owed_head = live
            self._earmark(live)
        return False

    def _earmark(self, live: LiveRequest) -> None:
        need = Need(0 if live.state is State.HELD else 1, self._blocks_needed(live))
        waits_for_copy = live.request_id in self._state.fences.values()
        self._earmarks.append(Earmark(live, need, binds_own_class=waits_for_copy, binds_all=False))

    def _victims_for(self, head: LiveRequest, need: Need) -> list[Victim] | None:
        state = self._state
        policy = state.classes[head.rank]
        if head.request_id in state.fences.values():
            return None  # what was pushed out for it is still being copied
        if policy.patience_steps is not None or policy.patience_ms is not None:
            victims = choose_victims(state, need, lower_classes(state, head.rank))
            if victims is not None:
                return None if self._is_worth_waiting(head, need, victims) else victims
        return choose_victims(state, need, overserved_tenants(state, head))

    def _is_worth_waiting(self, head: LiveRequest, need: Need, victims: list[Victim]) -> bool:
        """The lever *wait*: natural ends will free enough, soon enough.

        A class whose patience counts steps waits only while that is cheaper than its victims' copies; one whose patience
        counts time waits up to it, unless its promise would be missed.
        """
        state = self._state
        policy = state.classes[head.rank]
        step_us = state.cost.step_us
        waited_us = 0 if head.blocked_since_us is None else self._draft.now_us - head.blocked_since_us
        prefill_us = state.cost.to_us(state.cost.prefill_ns(head.computed, head.rest))
        slack_us = head.deadline_us - self._draft.now_us - prefill_us
        if policy.patience_steps is not None:
            patience_us = min(policy.patience_steps * step_us - waited_us, sum(victim.cost_us for victim in victims))
        else:
            patience_us = (policy.patience_ms or 0) * 1_000 - waited_us
        max_steps = min(patience_us, slack_us) // step_us
        return max_steps >= 1 and steps_until_free(state, need, max_steps) is not None

    def _push_out_for(self, head: LiveRequest, victims: list[Victim], need: Need) -> None:
        if victims[0].live.rank == head.rank:
            resource = Resource.FAIRNESS
        else:
            resource = Resource.MEMORY if need.blocks else Resource.SLOTS
        self._push_out(victims, resource, head)

    def _push_out(self, victims: list[Victim], resource: Resource, by: LiveRequest | None) -> None:
        for victim in victims:
            if victim.live.idle_step == self._draft.step:
                self._draft.num_idle -= 1
            self._state.suspend(victim.live, victim.lever, resource, by, self._draft)
            if victim.host_blocks:
                self._budget.grant_copies(self._state.cost.copy_ns(victim.host_blocks))

    def _guard_first_token(self, rank: int) -> None:
        """A prefill that promises a first token makes this step; lower classes may stretch it only a little, while that is cheap."""
        head = self._draft.first_token_by
        if head is None or head.rank != rank or not self._budget.first_token_hold_allowed:
            return
        self._budget.guard_first_token()
        self._draft.first_token_hold = any(self._state.has_work(lower) for lower in range(rank + 1, len(PriorityClass)))


def rows_of(state: EngineState, draft: Draft) -> tuple[list[ScheduledRow], list[LiveRequest]]:
    """The rows of a finished draft, and whose they are, aligned. Decodes by class, then prefill chunks."""
    rows: list[ScheduledRow] = []
    owners: list[LiveRequest] = []
    step, any_idle = draft.step, draft.num_idle > 0
    for members in state.running.decoding:
        for live in members.values():
            if any_idle and live.idle_step == step:
                continue
            output_ids = live.output_ids
            tokens = output_ids[-1:] if output_ids else live.tokens_between(live.computed, live.total)
            rows.append(
                ScheduledRow(live.request_id, tokens, live.computed, live.block_table, True, output_ids, live.sampling)
            )
            owners.append(live)
    for live, count in draft.chunks:
        end = live.computed + count
        tokens = live.tokens_between(live.computed, end)
        samples = end == live.total
        rows.append(
            ScheduledRow(
                live.request_id, tokens, live.computed, live.block_table, samples, live.output_ids, live.sampling
            )
        )
        owners.append(live)
    return rows, owners
