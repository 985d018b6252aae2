"""Entry headroom: the last slots and blocks of a class are for tenants that have less than their share of it.

Knows slots by tenant; refuses to know who waits. Without it a tenant that comes quietly finds every slot taken by one
that came with a flood, and waits for an end. A class without a target for its first token keeps nothing free, nor one
that a single tenant has used in the last minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest, State

if TYPE_CHECKING:
    from scheduler_engine.state import EngineState

_DIVISOR = 16  # 4 of 64 slots, and as much of the memory
_NEARLY_ALL = 8  # seven of eight
_MIXED_US = 60_000_000


class TenantMix:
    """Whether a class is used by more than one tenant. Always: true for a minute after the tenant last changed."""

    def __init__(self) -> None:
        self._last_tenant_id: str | None = None
        self._changed_us: int | None = None

    def note(self, tenant_id: str, now_us: int) -> None:
        """A request of the tenant has arrived."""
        if self._last_tenant_id not in (None, tenant_id):
            self._changed_us = now_us
        self._last_tenant_id = tenant_id

    def is_mixed(self, now_us: int) -> bool:
        return self._changed_us is not None and now_us - self._changed_us <= _MIXED_US


def is_loud(state: EngineState, live: LiveRequest) -> bool:
    """True when its tenant has more than its share of those who run in a class that others use too."""
    if not _is_shared(state, live):
        return False
    return _if_all_had(state, live.account, live.account.num_started) > state.running.num_in_slots(live.rank)


def dominates(state: EngineState, live: LiveRequest) -> bool:
    """True when nearly all who run in a class that others use too are its tenant's."""
    most = state.running.num_in_slots(live.rank)
    return _is_shared(state, live) and live.account.num_started * _NEARLY_ALL >= most * (_NEARLY_ALL - 1)


def is_kept_out(state: EngineState, live: LiveRequest, peak_blocks: int) -> bool:
    """True when a newcomer would take what is kept for others: its tenant has its share, and only the last slots
    or blocks are left. What lower classes hold counts as left. ``peak_blocks``: the highest point ahead with the
    newcomer in it.
    """
    rank = live.rank
    if live.state is not State.WAITING or not _is_shared(state, live):
        return False
    account, slot_cap, num_in_slots = live.account, state.slot_cap(rank), state.running.num_in_slots
    left = state.config.num_slots - sum(num_in_slots(higher) for higher in range(rank + 1))
    has_its_share = _if_all_had(state, account, account.num_started) >= slot_cap
    if has_its_share and min(left, slot_cap - num_in_slots(rank)) <= _kept(slot_cap):
        return True
    if peak_blocks <= state.memory_cap(live) - state.config.num_blocks // _DIVISOR:
        return False
    held = [(other.account is account, len(other.block_table)) for other in state.running.on_device(rank)]
    own_blocks = sum(num_blocks for is_own, num_blocks in held if is_own)
    return _if_all_had(state, account, own_blocks) >= max(1, sum(num_blocks for _, num_blocks in held))


def _kept(slot_cap: int) -> int:
    """Slots that are for others; one at least where there is more than one."""
    return max(min(1, slot_cap - 1), slot_cap // _DIVISOR)


def _is_shared(state: EngineState, live: LiveRequest) -> bool:
    return state.classes[live.rank].ttft_target_ms is not None and state.mixes[live.rank].is_mixed(state.now_us)


def _if_all_had(state: EngineState, account: Account, number: int) -> int:
    """How many it would be if every tenant had as many as this one, by weight; one like it is expected beside one that
    is alone.
    """
    weight = account.weight
    return number * max(2 * weight, state.accountant.active_weight(account.priority_class)) // weight
