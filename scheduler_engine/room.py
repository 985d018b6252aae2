"""Does a head fit, and if not, who must give way: shortages, earmarks, and the choice between pushing out and waiting.

Knows what is free and what is set aside; which victims are cheapest lives in ``preemption``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from scheduler_engine.budget import StepBudget
from scheduler_engine.claims import is_owed_room
from scheduler_engine.cost import to_us
from scheduler_engine.draft import Draft
from scheduler_engine.entry import is_kept_out
from scheduler_engine.events import Resource
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import RANKS, PriorityClass
from scheduler_engine.preemption import (
    Need,
    Victim,
    choose_victims,
    is_pinned,
    lower_classes,
    may_preempt,
    overserved_tenants,
    steps_until_free,
)
from scheduler_engine.record import Cause
from scheduler_engine.state import EngineState

_NOTHING = Need(0, 0)


class Fit(enum.Enum):
    """What a head is told: it may start, it waits and what it needs is set aside, or what is left is for others."""

    STARTS = enum.auto()
    WAITS = enum.auto()
    KEPT_OUT = enum.auto()


class Earmark(NamedTuple):
    """What a blocked head waits for. Newcomers and growth of lower classes see only what lies outside it."""

    head: LiveRequest
    need: Need
    binds_own_class: bool  # what was pushed out for it is still being copied: nobody slips in before it
    binds_others: bool  # its class is owed its floor: newcomers of all others leave it what comes free
    binds_growth: bool = True  # not while it waits for just those to come to their end


class Room:
    """Slots and blocks as the heads of one step see them. Always: what is set aside for a blocked head is seen by it
    alone among those below it.
    """

    def __init__(self, state: EngineState, draft: Draft, budget: StepBudget) -> None:
        self._state = state
        self._draft = draft
        self._budget = budget
        self._earmarks: list[Earmark] = []
        self._patient: LiveRequest | None = None  # a head that waits for natural ends although it could push out
        self._is_owed = [is_owed_room(state, rank) for rank in RANKS]
        owed_rank, state.owed_rank = state.owed_rank, None
        owed = None if owed_rank is None or not self._is_owed[owed_rank] else state.queues[owed_rank].head()
        if owed is not None and not self._is_at_slot_cap(owed.rank):
            need = Need(1, self.blocks_needed(owed))
            self._earmarks.append(Earmark(owed, need, binds_own_class=False, binds_others=True))

    def blocks_needed(self, live: LiveRequest) -> int:
        """The whole of what is known must fit: nobody is let in to be pushed out by its next chunk."""
        return max(0, self._state.config.num_blocks_for(live.total) - len(live.block_table))

    def has_slot(self, rank: int) -> bool:
        """True while somebody of the class might find a slot without pushing anybody out."""
        return self._state.running.num_slots_used < self._state.config.num_slots and not self._is_at_slot_cap(rank)

    def _is_at_slot_cap(self, rank: int) -> bool:
        """True when the class has all the slots that its policy gives it: nobody of another class can help."""
        return self._state.running.num_in_slots(rank) >= self._state.slot_cap(rank)

    def is_at_rest(self, rank: int) -> bool:
        """True when nobody of the least urgent class can start in this step, whoever its head is: no slot is free, it
        pushes nobody out, and none of its own tenants had so much that one of them would give way. Nobody else is
        bound by what such a head waits for.
        """
        state = self._state
        if rank != PriorityClass.BATCH or self.has_slot(rank) or self._may_push_lower(rank):
            return False
        if self._draft.holding[rank] or state.overload.is_paused or self._is_owed[rank]:
            return False  # there is another reason to tell, or a claim to what comes free
        return state.accountant.ceilings[rank] <= state.queues[rank].least_service + state.service_gap(rank)

    def _may_push_lower(self, rank: int) -> bool:
        policy = self._state.classes[rank]
        return policy.patience_steps is not None or policy.patience_ms is not None

    def _outranks(self, mark: Earmark, rank: int) -> bool:
        """Heads of higher classes come first, except before a class that is owed its floor."""
        return mark.head.rank < rank and not self._is_owed[rank]

    def _marked(self, rank: int, but: LiveRequest | None) -> Need:
        """What earmarks keep from a newcomer of the class."""
        slots = blocks = 0
        for mark in self._earmarks:
            is_bound = mark.binds_own_class if mark.head.rank == rank else mark.binds_others
            if mark.head is not but and (self._outranks(mark, rank) or is_bound):
                slots += mark.need.slots
                blocks += mark.need.blocks
        return Need(slots, blocks)

    def blocks_to_grow(self, rank: int) -> int:
        """Free blocks less what heads of higher classes wait for: for decodes of the class. May be negative."""
        marked = sum(mark.need.blocks for mark in self._earmarks if mark.binds_growth and self._outranks(mark, rank))
        return self._state.device.num_free - marked

    def is_awaited_above(self, rank: int) -> bool:
        """True when a head of a higher class waits for room."""
        return any(self._outranks(mark, rank) for mark in self._earmarks)

    def _shortage(self, live: LiveRequest) -> Need:
        """What is missing for a start now. A held request is bound by no earmark: running on is how its blocks come
        free.
        """
        state = self._state
        marked = _NOTHING if live.state is State.HELD else self._marked(live.rank, live)
        slots = state.running.num_slots_used + 1 + marked.slots - state.config.num_slots
        slots = max(slots, state.running.num_in_slots(live.rank) + 1 - state.slot_cap(live.rank))
        blocks = self.blocks_needed(live) + marked.blocks - state.device.num_free
        return Need(max(0, slots), max(0, blocks))

    def _peak(self, live: LiveRequest) -> int:
        """Blocks at the highest point ahead if this request started now; 0 where that binds nobody."""
        state = self._state
        is_alone = not any(True for _ in state.running)
        if live.state is State.HELD or is_alone:
            return 0  # one that is held is part of the peak already
        state.estimate_total(live)
        return state.peak.peak_blocks(live.rank, have=live.total, remaining=live.estimated_total - live.total)

    def _mark(self, live: LiveRequest) -> int:
        """Blocks up to which a class may plan: its cap, less what the classes above are likely to want soon."""
        state = self._state
        mark = state.memory_cap(live) - state.headroom.reserve(live.rank, state.now_us)
        return max(mark, state.config.num_blocks_for(live.finish_total))

    def must_rest(self, live: LiveRequest) -> bool:
        """True for one that would come back into memory just taken from its class, unless twice its room is free."""
        state = self._state
        if live.state not in (State.ON_HOST, State.DROPPED) or not state.headroom.is_resting(live.rank, state.now_us):
            return False
        if state.device.num_free >= 2 * self.blocks_needed(live):
            return False
        state.tally.num_rests += 1
        return True

    def make(self, live: LiveRequest, blocked: LiveRequest | None) -> Fit:
        """Whether the request may start now. May push out others for it, all or nothing."""
        need = self._shortage(live)
        if need != _NOTHING and self._would_push_nobody(live):
            self._state.estimate_total(live)
            return Fit.WAITS if blocked is not None else self._wait(live, need)
        peak = self._peak(live)
        if peak and is_kept_out(self._state, live, peak) and not overserved_tenants(self._state, live):
            self._state.tally.num_kept_out += 1
            self._state.journal.blocked(live, Cause.SHARE, _NOTHING)
            return Fit.KEPT_OUT
        peak_excess = max(0, peak - self._mark(live))
        if need == _NOTHING and not peak_excess:
            return Fit.STARTS
        if blocked is not None:  # only the head of the class may push out others
            return Fit.WAITS
        victims = self._victims_for(live, need, peak_excess)
        if victims is not None:
            self._push_out_for(live, victims, need)
            if self._shortage(live) == _NOTHING:
                return Fit.STARTS
        return self._wait(live, need)

    def _would_push_nobody(self, live: LiveRequest) -> bool:
        """True where no look ahead is needed to see that the head of such a class stays where it is."""
        has_target = self._state.classes[live.rank].ttft_target_ms is not None
        return not has_target and not self._may_push_lower(live.rank) and not overserved_tenants(self._state, live)

    def wait_for_slot(self, live: LiveRequest) -> None:
        """The head of a class at rest stays where it is."""
        self._wait(live, self._shortage(live))

    def _wait(self, live: LiveRequest, need: Need) -> Fit:
        if live.blocked_since_us is None:
            live.blocked_since_us = self._draft.now_us
        if self._is_owed[live.rank]:
            self._state.owed_rank = live.rank
        self.earmark(live)
        self._state.journal.blocked(live, self._why_blocked(live, need), need)
        return Fit.WAITS

    def _why_blocked(self, live: LiveRequest, need: Need) -> Cause:
        state = self._state
        if live.request_id in state.fences.values():
            return Cause.COPY_FENCE
        if self._patient is live:
            return Cause.PATIENCE
        if need == _NOTHING:
            return Cause.HEADROOM
        if not self.has_slot(live.rank):
            return Cause.SLOTS
        return Cause.MEMORY if self.blocks_needed(live) > state.device.num_free else Cause.EARMARK

    def earmark(self, live: LiveRequest) -> None:
        """Set aside what it waits for; nothing for one that only an end in its own class can help."""
        if self._is_at_slot_cap(live.rank):
            return
        need = Need(0 if live.state is State.HELD else 1, self.blocks_needed(live))
        waits_for_copy = live.request_id in self._state.fences.values()
        is_patient = self._patient is live
        self._earmarks.append(
            Earmark(live, need, binds_own_class=waits_for_copy, binds_others=False, binds_growth=not is_patient)
        )

    def _victims_for(self, head: LiveRequest, need: Need, peak_excess: int) -> list[Victim] | None:
        """Lower classes first, if the class may preempt; else those of its own that had far more than it."""
        state = self._state
        if head.request_id in state.fences.values():
            return None  # what was pushed out for it is still being copied
        may_push_lower = self._may_push_lower(head.rank) and not self._is_at_slot_cap(head.rank)
        if may_push_lower and not peak_excess:  # lower classes are no part of its peak
            victims = self._lower_victims(head, need)
            if victims is not None:
                if not self._is_worth_waiting(head, need, victims):
                    return victims
                self._patient = head
                return None
        need = Need(need.slots, max(need.blocks, peak_excess))
        return choose_victims(state, need, overserved_tenants(state, head))

    def _lower_victims(self, head: LiveRequest, need: Need) -> list[Victim] | None:
        """Those who gave way often enough are left alone, unless the head's promise would be broken by that."""
        state = self._state
        candidates = list(lower_classes(state, head.rank))
        if state.accountant.is_over(head.account, state.now_us):
            candidates = [live for live in candidates if may_preempt(state, head, live)]
        victims = choose_victims(state, need, [live for live in candidates if not is_pinned(state, live)])
        if victims is not None:
            return victims
        max_steps = self._slack_us(head) // state.cost.step_us
        is_soon = max_steps >= 1 and steps_until_free(state, need, max_steps) is not None
        if not is_soon:
            return choose_victims(state, need, candidates)
        self._patient = head
        return None

    def _slack_us(self, head: LiveRequest) -> int:
        """Time until the head must start for its promise."""
        prefill_us = to_us(self._state.cost.prefill_ns(head.computed, head.rest))
        return head.deadline_us - self._draft.now_us - prefill_us

    def _is_worth_waiting(self, head: LiveRequest, need: Need, victims: list[Victim]) -> bool:
        """The lever *wait*: natural ends will free enough, soon enough.

        A class whose patience counts steps waits only while that is cheaper than its victims' copies; one whose
        patience counts time waits up to it, unless its promise would be missed.
        """
        state = self._state
        policy = state.classes[head.rank]
        step_us = state.cost.step_us
        waited_us = 0 if head.blocked_since_us is None else self._draft.now_us - head.blocked_since_us
        if policy.patience_steps is not None:
            patience_us = min(policy.patience_steps * step_us - waited_us, sum(victim.cost_us for victim in victims))
        else:
            patience_us = (policy.patience_ms or 0) * 1_000 - waited_us
        max_steps = min(patience_us, self._slack_us(head)) // step_us
        return max_steps >= 1 and steps_until_free(state, need, max_steps) is not None

    def _push_out_for(self, head: LiveRequest, victims: list[Victim], need: Need) -> None:
        if victims[0].live.rank == head.rank:
            resource = Resource.FAIRNESS
        else:
            resource = Resource.MEMORY if need.blocks else Resource.SLOTS
        self.push_out(victims, resource, head)

    def push_out(self, victims: list[Victim], resource: Resource, by: LiveRequest | None) -> None:
        for victim in victims:
            num_dirty = victim.host_blocks - len(victim.live.host_blocks)
            self._draft.idle.pop(victim.live.request_id, None)
            self._state.suspend(victim.live, victim.lever, resource, by, self._draft)
            if num_dirty > 0:
                self._budget.grant_copies(self._state.cost.copy_ns(num_dirty))
