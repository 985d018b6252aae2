"""Where a tenant stands in the order of its class when somebody of it begins to wait (decision 27).

Knows who waits and who is on the device; how service is lifted lives in ``fairness``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_engine.fairness import Account

if TYPE_CHECKING:
    from scheduler_engine.state import EngineState


def begin_to_wait(state: EngineState, account: Account) -> None:
    """Somebody of the tenant comes into its class's order; others of it may be there already."""
    queue = state.queues[account.priority_class]
    if queue.is_in_order(account):
        return
    head = queue.head()
    on_device = (live.account for live in state.running.on_device(account.priority_class))
    state.accountant.begin_to_wait(account, None if head is None else head.account, on_device)


def come_back(state: EngineState, account: Account) -> None:
    """Its own cap may hold the tenant back no longer."""
    queue = state.queues[account.priority_class]
    if queue.is_parked(account):
        begin_to_wait(state, account)
        queue.unpark(account)
