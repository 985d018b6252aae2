"""Promise or refuse: what can never fit, what would be late, and when it is worth coming back.

Knows queues and predicted costs; refuses to know who runs at this moment.
"""

from __future__ import annotations

from scheduler_engine.calibration import ONE
from scheduler_engine.cost import to_us
from scheduler_engine.events import RejectReason
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import Request
from scheduler_engine.state import EngineState

_RETRY_MIN_US = 1_000_000
_RETRY_MAX_US = 30_000_000


class Door:
    """Decides at arrival. Always: a refusal has a reason, and a hint when to return unless returning cannot help."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def refusal(self, request: Request, account: Account) -> tuple[RejectReason, int | None] | None:
        """Why this request is not let in, or None."""
        state = self._state
        cell = state.cells.get((request.priority_class, request.tenant_id))
        if cell is not None and not cell.allowed:
            return RejectReason.NOT_ALLOWED, None
        if request.request_id in state.lives or state.device.is_fenced(request.request_id):
            return RejectReason.DUPLICATE, None
        known = len(request.prompt_token_ids) + len(request.delivered_token_ids)
        if not request.prompt_token_ids or request.max_tokens < 1 or known >= state.config.max_model_len:
            return RejectReason.CONTEXT_LENGTH, None
        rank = int(request.priority_class)
        longest = min(len(request.prompt_token_ids) + request.max_tokens, state.config.max_model_len)
        cap = state.config.num_blocks * state.classes[rank].cap_memory_percent // 100
        if state.config.num_blocks_for(longest) > cap:
            return RejectReason.NEVER_FITS, None
        if state.draining:
            return RejectReason.DRAINING, _RETRY_MIN_US
        return self._too_late(request, account, rank)

    def _too_late(self, request: Request, account: Account, rank: int) -> tuple[RejectReason, int | None] | None:
        state = self._state
        queue = state.queues[rank]
        wait_us = predicted_wait_us(state, rank, account)
        likely_us = calibrated(state, rank, wait_us, 50)
        sure_us = calibrated(state, rank, wait_us, 90)
        retry_us = spread(likely_us, len(state.lives))
        is_full = queue.num_waiting >= state.config.max_waiting_per_class
        if is_full or queue.num_waiting_of(account) >= state.config.max_waiting_per_tenant:
            return RejectReason.CLASS_CLOSED, retry_us
        limit_us = queue_wait_limit_us(state, request)
        if limit_us is not None and likely_us > limit_us:
            return RejectReason.QUEUE_WAIT, spread(likely_us - limit_us, len(state.lives))
        deadline_us = hard_deadline_us(state, request, account)
        if deadline_us is not None:
            prefill_us = own_prefill_us(state, 0, len(request.prompt_token_ids) + len(request.delivered_token_ids))
            if sure_us + prefill_us > deadline_us:
                return RejectReason.LATE, spread(likely_us + prefill_us - deadline_us, len(state.lives))
        return None


def queue_wait_limit_us(state: EngineState, request: Request) -> int | None:
    """The tighter of the request's own limit and its class's."""
    policy_ms = state.classes[request.priority_class].max_queue_wait_ms
    limits = [limit for limit in (request.max_queue_wait_us, policy_ms and policy_ms * 1_000) if limit is not None]
    return min(limits, default=None)


def hard_deadline_us(state: EngineState, request: Request, account: Account) -> int | None:
    """The tightest of the request's, its tenant's and its class's deadline to the first token."""
    policy_ms = state.classes[request.priority_class].hard_deadline_ms
    limits = [
        limit
        for limit in (request.hard_deadline_us, account.hard_deadline_us, policy_ms and policy_ms * 1_000)
        if limit is not None
    ]
    return min(limits, default=None)


def own_prefill_us(state: EngineState, start: int, rest: int) -> int:
    """How long its own prefill keeps a request from its first token, with the steps' fixed cost, alone."""
    return to_us(state.cost.prefill_ns(start, rest) + state.cost.base_ns)


def predicted_wait_us(state: EngineState, rank: int, account: Account) -> int:
    """Device time that goes first: all of the classes above, and in the class what least-service order puts before it.

    Fluid estimate: while the tenant's own line drains, every active tenant drains by its weight. O(1).
    """
    above_us = sum(state.queues[higher].waiting_us for higher in range(rank))
    queue = state.queues[rank]
    own_us = queue.waiting_us_of(account)
    weights = max(account.weight, state.accountant.active_weight(rank))
    shared_us = own_us * weights // account.weight
    return above_us + min(queue.waiting_us, shared_us)


def calibrated(state: EngineState, rank: int, wait_us: int, percent: int) -> int:
    """A predicted wait corrected by how earlier predictions turned out."""
    calibration = state.calibrations[rank]
    return wait_us * (calibration.q90 if percent >= 90 else calibration.q50) // ONE


def spread(overshoot_us: int, salt: int) -> int:
    """Retry-After: the overshoot, within 1 s and 30 s, spread over a quarter more so that the refused do not return
    together.
    """
    base_us = min(_RETRY_MAX_US, max(_RETRY_MIN_US, overshoot_us))
    return base_us + base_us * ((salt * 2_654_435_761 >> 8) % 256) // 1_024


def retry_after_us(state: EngineState, live: LiveRequest) -> int:
    """When one that was shed from the queue may come back: once what waits now has drained by what it lacked."""
    wait_us = calibrated(state, live.rank, predicted_wait_us(state, live.rank, live.account), 50)
    return spread(wait_us, live.sequence_number)


def is_late(state: EngineState, live: LiveRequest, *, count: int, granted_ns: int) -> bool:
    """The second shedding point, just before prefill: can the first token still come in time? Never for one that has
    run.

    ``granted_ns``: predicted cost of the step so far; the step would take ``count`` tokens of this request on top.
    """
    if live.state is not State.WAITING or live.hard_deadline_us is None:
        return False
    cost = state.cost
    needed_ns = granted_ns + cost.prefill_ns(live.computed, count)
    rest = live.rest - count
    if rest:
        num_more_steps = -(-rest // state.classes[live.rank].chunk_max)
        needed_ns += cost.prefill_ns(live.computed + count, rest) + num_more_steps * cost.base_ns
    return state.now_us + to_us(needed_ns) > live.hard_deadline_us


def note_start(state: EngineState, live: LiveRequest, now_us: int) -> None:
    """Learn from a wait that has ended."""
    if live.state is State.WAITING:
        state.calibrations[live.rank].observe(predicted_us=live.predicted_wait_us, actual_us=now_us - live.arrival_us)


def is_closed(state: EngineState, rank: int) -> bool:
    """True when a request of the class, of an average tenant, would be refused now."""
    policy = state.classes[rank]
    queue = state.queues[rank]
    if state.draining or queue.num_waiting >= state.config.max_waiting_per_class:
        return True
    if policy.max_queue_wait_ms is None:
        return False
    return class_wait_us(state, rank, 50) > policy.max_queue_wait_ms * 1_000


def class_wait_us(state: EngineState, rank: int, percent: int) -> int:
    """Estimated start of a request that comes last in its class."""
    wait_us = sum(state.queues[higher].waiting_us for higher in range(rank + 1))
    return calibrated(state, PriorityClass(rank), wait_us, percent)
