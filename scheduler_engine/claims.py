"""What a class that is owed its floor of device time runs on: the same part of the slots or of the memory, and no more.

Knows floors and who is on the device; refuses to know who wants their place.
"""

from __future__ import annotations

from scheduler_engine.live import LiveRequest, State
from scheduler_engine.state import EngineState


def is_owed_room(state: EngineState, rank: int) -> bool:
    """True for a class in debt that has less than its floor's part: what comes free is its."""
    if not state.floors.in_debt(rank):
        return False
    tables = [len(live.block_table) for live in state.running.on_device(rank)]
    return not _is_floor_part(state, rank, num_requests=len(tables), num_blocks=sum(tables))


def beyond_floor(state: EngineState, rank: int) -> list[LiveRequest]:
    """Whom a class in debt can spare: of those on the device the first ones that its floor's part has room for stay;
    where none is so small, the smallest.
    """
    kept: list[LiveRequest] = []
    num_blocks = 0
    first = sorted(state.running.on_device(rank), key=lambda live: (live.state is State.HELD, live.order_key))
    for live in first:
        more_blocks = num_blocks + len(live.block_table)
        if _is_within_floor(state, rank, num_requests=len(kept) + 1, num_blocks=more_blocks):
            kept.append(live)
            num_blocks = more_blocks
    if not kept and first:
        kept.append(min(first, key=lambda live: (len(live.block_table), live.order_key)))
    return [live for live in first if live not in kept]


def _is_within_floor(state: EngineState, rank: int, *, num_requests: int, num_blocks: int) -> bool:
    """True when it is no more than the floor's part of either; one request is not too many."""
    floor_percent, config = state.classes[rank].floor_percent, state.config
    has_slots = num_requests == 1 or 100 * num_requests <= floor_percent * config.num_slots
    return has_slots and 100 * num_blocks <= floor_percent * config.num_blocks


def _is_floor_part(state: EngineState, rank: int, *, num_requests: int, num_blocks: int) -> bool:
    """True when so much is the floor's part of one of the two; nothing never is."""
    floor_percent, config = state.classes[rank].floor_percent, state.config
    has_slots = 100 * num_requests >= floor_percent * config.num_slots
    return num_requests > 0 and (has_slots or 100 * num_blocks >= floor_percent * config.num_blocks)
