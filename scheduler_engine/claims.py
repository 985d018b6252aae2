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
    """Whom a class in debt can spare: of those on the device the first ones are its floor's part, and stay."""
    spare: list[LiveRequest] = []
    num_blocks = 0
    first = sorted(state.running.on_device(rank), key=lambda live: (live.state is State.HELD, live.order_key))
    for number, live in enumerate(first):
        if _is_floor_part(state, rank, num_requests=number, num_blocks=num_blocks):
            spare.append(live)
        num_blocks += len(live.block_table)
    return spare


def _is_floor_part(state: EngineState, rank: int, *, num_requests: int, num_blocks: int) -> bool:
    """True when so much is the floor's part of one of the two; nothing never is."""
    floor_percent, config = state.classes[rank].floor_percent, state.config
    has_slots = 100 * num_requests >= floor_percent * config.num_slots
    return num_requests > 0 and (has_slots or 100 * num_blocks >= floor_percent * config.num_blocks)
