"""Decodes of a step: who sits it out for somebody's promise, and who must give way so that the others may grow.

Knows running decodes; refuses to let anybody in.
"""

from __future__ import annotations

from scheduler_engine.budget import StepBudget
from scheduler_engine.draft import Draft
from scheduler_engine.events import Lever, Preempted, Resource
from scheduler_engine.live import LiveRequest
from scheduler_engine.policy import PriorityClass
from scheduler_engine.preemption import Need, choose_victims, lower_classes
from scheduler_engine.record import Cause
from scheduler_engine.room import Room
from scheduler_engine.state import EngineState


class DecodePlanner:
    """Always: a decode that gets a row in this step has a block for its token before any row is written."""

    def __init__(self, state: EngineState, draft: Draft, budget: StepBudget, room: Room) -> None:
        self._state = state
        self._draft = draft
        self._budget = budget
        self._room = room

    def plan(self, rank: int) -> None:
        if not self._state.running.decoding[rank]:
            return
        self._hold_for_step_time(rank)
        self._grow(rank)
        running = self._state.running
        num_rows, tokens = len(running.decoding[rank]), running.decode_tokens[rank]
        if self._draft.idle:
            idle = [live for live in self._draft.idle.values() if live.rank == rank]
            num_rows -= len(idle)
            tokens -= sum(live.total for live in idle)
        self._budget.grant_decodes(num_rows, tokens)

    def _hold_for_step_time(self, rank: int) -> None:
        """Lever 0: decodes that do not fit under the promises of the classes above keep slot and KV and sit this step
        out.

        The longest running ones go on, so that whoever is held is held for a bounded time.
        """
        running, cost = self._state.running, self._state.cost
        members = running.decoding[rank]
        room_ns = self._budget.decode_room_ns(rank)
        held_before = running.step_held[rank]
        if cost.decode_ns(len(members), running.decode_tokens[rank]) <= room_ns:
            for live in held_before.values():
                self._state.journal.served(live)
                self._state.outbox.resumed.append(live.request_id)
            held_before.clear()
            return
        self._draft.holding[rank] = True
        keeps_one = self._budget.num_tokens == 0 and not self._draft.chunks
        newly_held: list[LiveRequest] = []
        idle = self._draft.idle
        for request_id, live in members.items():
            if room_ns >= 0:
                room_ns -= cost.decode_ns(1, live.total)
            if room_ns >= 0 or keeps_one:
                keeps_one = False
                if held_before.pop(request_id, None) is not None:
                    self._state.journal.served(live)
                    self._state.outbox.resumed.append(request_id)
                continue
            idle[request_id] = live
            if request_id not in held_before:
                newly_held.append(live)
        self._note_holds(rank, newly_held)

    def _sit_out(self, live: LiveRequest) -> None:
        self._draft.idle[live.request_id] = live

    def _note_holds(self, rank: int, newly_held: list[LiveRequest]) -> None:
        by = self._draft.first_token_by
        by_id = None if by is None else by.request_id
        step_held, preempted = self._state.running.step_held[rank], self._state.outbox.preempted
        self._state.journal.held(rank, newly_held, by)
        for live in newly_held:
            live.num_holds += 1
            step_held[live.request_id] = live
            preempted.append(Preempted(live.request_id, Lever.HOLD, Resource.STEP_TIME, by_id))

    def _grow(self, rank: int) -> None:
        """Decodes at a block edge get their block; who must give way for it is settled before any block is taken."""
        needy = self._needy(rank)
        if not needy:
            return
        may_give_way = True
        while may_give_way and (short := len(needy) - self._room.blocks_to_grow(rank)) > 0:
            may_give_way = self._give_way_for_growth(rank, needy[0], short)
            needy = self._needy(rank)  # a needy one may have gone itself
        num_served = min(len(needy), max(0, self._room.blocks_to_grow(rank)))
        if not num_served and self._would_be_empty(rank, len(needy)):
            num_served = min(len(needy), self._state.device.num_free, 1)
        running, device, step = self._state.running, self._state.device, self._draft.step
        for live in needy[:num_served]:
            running.grow(live, device.take_one())
            live.granted_step = step
            self._state.journal.served(live)
        for live in needy[num_served:]:
            self._sit_out(live)
            self._state.journal.starved(live, Cause.MEMORY)

    def unblock(self) -> None:
        """Nobody would move, each waiting for a block of somebody else's: the most urgent decode gets one, though it be
        from one that must come out the same and finds no room on the host.
        """
        state, draft = self._state, self._draft
        needy = [live for members in state.running.at_block_edge for live in members.values()]
        if not needy:
            return
        first = min(needy, key=lambda live: (live.rank, live.order_key))
        if not state.device.num_free:
            others = [live for live in state.running if live is not first and live.started_step != draft.step]
            victims = choose_victims(state, Need(0, 1), others, reproducible_may_drop=True)
            if victims is None:
                return
            self._room.push_out(victims, Resource.MEMORY, None)
        if state.fences or not state.device.num_free:
            return
        state.running.grow(first, state.device.take_one())
        first.granted_step = draft.step
        draft.idle.pop(first.request_id, None)
        state.running.step_held[first.rank].pop(first.request_id, None)
        self._budget.grant_decodes(1, first.total)
        state.journal.served(first)

    def _would_be_empty(self, rank: int, num_needy: int) -> bool:
        """True when nobody would move if all of these waited: what is set apart for a head helps nobody then, for its
        room comes from those who move on.
        """
        num_idle = sum(live.rank == rank for live in self._draft.idle.values())
        is_last = not any(self._state.running.decoding[lower] for lower in range(rank + 1, len(PriorityClass)))
        is_first = not self._budget.num_tokens and not self._draft.chunks
        return is_first and is_last and num_needy + num_idle == len(self._state.running.decoding[rank])

    def _needy(self, rank: int) -> list[LiveRequest]:
        idle = self._draft.idle
        return [live for live in self._state.running.at_block_edge[rank].values() if live.request_id not in idle]

    def _give_way_for_growth(self, rank: int, first: LiveRequest, short: int) -> bool:
        """Push out somebody so that decodes of the class may grow. False when they must wait instead."""
        state = self._state
        if None in state.fences.values():
            return False  # blocks are already on their way
        need = Need(0, short)
        victims = choose_victims(state, need, lower_classes(state, rank))
        if victims is not None:
            self._room.push_out(victims, Resource.MEMORY, first)
            return not state.fences
        if self._room.is_awaited_above(rank):
            return False  # whoever gave way now would do so for a higher head, not for this growth
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
        self._room.push_out(victims, Resource.MEMORY, None)
        return not state.fences
