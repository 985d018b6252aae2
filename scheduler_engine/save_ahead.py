"""The last beat of a plan: a step without other copies saves a few full blocks of those who may have to give way soon.

When they do, only what is not saved yet has to be copied. Knows pressure and bounds; refuses to push anybody out.
"""

from __future__ import annotations

from scheduler_engine.draft import Draft
from scheduler_engine.live import ON_DEVICE, LiveRequest
from scheduler_engine.policy import RANKS, ClassPolicy
from scheduler_engine.preemption import likely_victims
from scheduler_engine.state import EngineState

_HOST_DIVISOR = 2  # at most half of the host pool
_STEP_DIVISOR = 64  # at most so small a part of a usual step's time
_FREE_DIVISOR = 8  # nobody is pushed out of memory while an eighth of it is free
_ACTIVE_US = 60_000_000
_NUM_LIKELY = 8


def save_ahead(state: EngineState, draft: Draft) -> None:
    """O(1) where there is no pressure; else the victims are looked for once in a block's time."""
    if not _may_copy(state, draft):
        return
    checkpoints, block_size = state.checkpoints, state.config.block_size
    share = state.host.num_blocks // _HOST_DIVISOR
    if state.step >= checkpoints.look_again_step:
        _look_again(state, share)
    count = _copies_per_step(state)
    for live in checkpoints.likely:
        if not _is_running(state, live):
            continue
        room = min(state.host.num_free, share - checkpoints.num_blocks)
        fitting = min(count, room, live.computed // block_size - len(live.host_blocks))
        if fitting > 0:
            state.save_ahead(live, fitting, draft)
            count -= fitting
        if not count:
            return


def _look_again(state: EngineState, share: int) -> None:
    """Who is likely to give way now; where the share is full, those who no longer are make room."""
    checkpoints = state.checkpoints
    checkpoints.look_again_step = state.step + state.config.block_size
    rank = _most_urgent_that_preempts(state)
    checkpoints.likely = [] if rank is None else likely_victims(state, rank, _NUM_LIKELY)
    if checkpoints.num_blocks >= share:
        for live in checkpoints.unlikely():
            state.drop_checkpoint(live)


def _may_copy(state: EngineState, draft: Draft) -> bool:
    """Where blocks leave in order, memory is short, the step has no copies of its own and nobody waits for its first
    token.
    """
    if not is_short(state, state.device.num_free):
        return False
    return not (draft.swap_out or draft.swap_in or draft.first_token_by) and state.running.num_slots_used > 0


def is_short(state: EngineState, num_free: int) -> bool:
    """True where some may have to leave when so few blocks are free, and those that leave are saved in order."""
    config = state.config
    is_scarce = num_free * _FREE_DIVISOR <= config.num_blocks
    return is_scarce and config.num_host_blocks > 0 and config.copies_in_order


def _copies_per_step(state: EngineState) -> int:
    cost = state.cost
    return cost.step_us * 1_000 // _STEP_DIVISOR // max(1, cost.copy_ns(1))


def _most_urgent_that_preempts(state: EngineState) -> int | None:
    """Of the classes that have had work lately."""
    for rank in RANKS:
        last_us = state.last_active_us[rank]
        if _is_preempting(state.classes[rank]) and last_us is not None and state.now_us - last_us <= _ACTIVE_US:
            return rank
    return None


def _is_preempting(policy: ClassPolicy) -> bool:
    return policy.patience_steps is not None or policy.patience_ms is not None


def _is_running(state: EngineState, live: LiveRequest) -> bool:
    return state.lives.get(live.request_id) is live and live.state in ON_DEVICE
