"""Do all books balance: pools, slots, queues, charges, and each request in the one place its state says.

Knows what must add up; changes nothing.
"""

from __future__ import annotations

from collections import Counter

from scheduler_engine.draft import Draft
from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import IN_SLOT, SUSPENDED, State
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from scheduler_engine.state import EngineState


def check_totals(state: EngineState) -> None:
    """O(1) books, for every step."""
    state.device.check_totals()
    state.host.check_totals()
    if state.running.num_slots_used > state.config.num_slots:
        raise BrokenBooks(f"{state.running.num_slots_used} slots used of {state.config.num_slots}")


def check_books(state: EngineState, draft: Draft | None) -> None:
    """All books, O(everything). ``draft`` is the step being executed, whose swap-ins still read host blocks."""
    check_totals(state)
    lives = state.lives
    state.device.check_books({i: live.block_table for i, live in lives.items() if live.block_table})
    host_owners = {i: live.host_blocks for i, live in lives.items() if live.host_blocks}
    if draft is not None and draft.host_blocks_after:
        host_owners[RequestId("(this step's swap-ins)")] = draft.host_blocks_after
    state.host.check_books(host_owners)
    state.checkpoints.check_books(lives, state.config.block_size)
    state.running.check_books()
    state.peak.check_books(state.running)
    state.accountant.check_books()
    for queue in state.queues:
        queue.check_books()
    _check_places(state)
    _check_waits(state)


def _check_places(state: EngineState) -> None:
    on_device = {live.request_id for live in state.running}
    queued = {live.request_id for queue in state.queues for live in queue.waiting()}
    for request_id, live in state.lives.items():
        runs = live.state in IN_SLOT
        place = (request_id in on_device, request_id in queued, request_id in state.fences)
        expected = (
            runs or live.state is State.HELD,
            not runs and live.state is not State.SAVING,
            live.state is State.SAVING,
        )
        if place != expected:
            raise BrokenBooks(f"{request_id} in state {live.state.name} is in the wrong place: {place}")
        if live.computed > live.total or live.computed > len(live.block_table) * state.config.block_size > 0:
            raise BrokenBooks(f"{request_id} has {live.computed} tokens computed, {len(live.block_table)} blocks")
    strangers = (on_device | queued) - state.lives.keys()
    if strangers:
        raise BrokenBooks(f"ended requests are still held somewhere: {sorted(strangers)}")
    counted = Counter(live.rank for live in state.lives.values())
    if [counted[rank] for rank in PriorityClass] != state.num_lives:
        raise BrokenBooks(f"{state.num_lives} requests live in the classes, counted {dict(counted)}")
    for rank in PriorityClass:
        suspended = sum(live.rank == rank and live.state in SUSPENDED for live in state.lives.values())
        if suspended != state.num_suspended[rank]:
            raise BrokenBooks(f"class {rank.label}: {state.num_suspended[rank]} suspended, counted {suspended}")


def _check_waits(state: EngineState) -> None:
    """Each microsecond before the first start has one cause."""
    journal = state.journal
    for live in state.lives.values():
        log = journal.waits.until(live.account, live.waits, journal.now_us)
        until_us = journal.now_us if live.first_start_us is None else live.first_start_us
        queued_us, waited_us = sum(log.queued.values()), until_us - live.arrival_us
        if queued_us != waited_us or min((*log.queued.values(), *log.paused.values()), default=0) < 0:
            raise BrokenBooks(f"{live.request_id} waited {waited_us} us, and its causes say {log.queued} {log.paused}")
