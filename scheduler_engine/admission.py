"""Promise or refuse: what can never fit, what would be late, and when it is worth coming back.

Knows queues, values and predicted waits; refuses to know who runs at this moment.
"""

from __future__ import annotations

from scheduler_engine.calibration import ONE
from scheduler_engine.deadlines import latest_start_us
from scheduler_engine.events import RejectReason
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import Request
from scheduler_engine.returns import RETRY_MIN_US
from scheduler_engine.state import EngineState
from scheduler_engine.value import share_of_equals

Refusal = tuple[RejectReason, int | None]


class Door:
    """Decides at arrival. Always: a refusal has a reason, and a hint when to return unless returning cannot help."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def never(self, request: Request) -> Refusal | None:
        """Why this request is not let in whatever waits, or None."""
        state = self._state
        cell = state.cells.get((request.priority_class, request.tenant_id))
        # What has started elsewhere waits where its class is paused meanwhile.
        if cell is not None and not request.has_started and (not cell.allowed or cell.concurrency == 0):
            return RejectReason.NOT_ALLOWED, None
        if request.request_id in state.lives or state.device.is_fenced(request.request_id):
            return RejectReason.DUPLICATE, None
        num_prompt_tokens = len(request.prompt_token_ids)
        if not num_prompt_tokens or request.max_tokens < 1 or num_prompt_tokens >= state.config.max_model_len:
            return RejectReason.CONTEXT_LENGTH, None
        longest = min(num_prompt_tokens + request.max_tokens, state.config.max_model_len)
        cap = state.config.num_blocks * state.classes[request.priority_class].cap_memory_percent // 100
        if state.config.num_blocks_for(longest) > cap:
            return RejectReason.NEVER_FITS, None
        if state.draining and not request.has_started:
            return RejectReason.DRAINING, RETRY_MIN_US
        return None

    def now(self, live: LiveRequest) -> Refusal | None:
        """Why this request is not let in as things stand, or None. Sets what wait is predicted for it."""
        state = self._state
        queue = state.queues[live.rank]
        live.predicted_wait_us = predicted_wait_us(state, live)
        if live.request.has_started:
            return None
        is_full = queue.num_waiting >= state.config.max_waiting_per_class
        if is_full or queue.num_waiting_of(live.account) >= state.config.max_waiting_per_tenant:
            return RejectReason.CLASS_CLOSED, retry_after_us(state, live)
        if live.queue_wait_limit_us is not None and not self._is_in_time(live, live.queue_wait_limit_us, 50):
            return RejectReason.QUEUE_WAIT, retry_after_us(state, live)
        latest_us = latest_start_us(state, live)
        if latest_us is not None and latest_us < state.now_us:
            return RejectReason.LATE, None  # not even alone on the device
        if latest_us is not None and not self._is_in_time(live, latest_us, 50 if live.is_promised else 90):
            return RejectReason.LATE, retry_after_us(state, live)
        return None

    def _is_in_time(self, live: LiveRequest, latest_us: int, percent: int) -> bool:
        """Would the work ahead be done by ``latest_us``, with the part of that time its value may count on?"""
        state = self._state
        room_us = latest_us - state.now_us
        wait_us = calibrated(state, live.rank, live.predicted_wait_us, percent)
        if wait_us == 0:
            return room_us >= 0
        share = state.values[live.rank].share(
            live.request.value_micros,
            has_returns=state.returns[live.rank].has_open(state.now_us),
            is_return=live.is_promised,
            now_us=state.now_us,
        )
        is_in_time = wait_us <= room_us * share // ONE
        if share == ONE and not is_in_time and not live.is_promised:
            state.returns[live.rank].thin_out()  # the dearest stay out because of those who came back
        return is_in_time


def predicted_wait_us(state: EngineState, live: LiveRequest) -> int:
    """Device time that goes first: all of the classes above, and in its class what is worth more and what
    least-service order puts before it.

    Fluid estimate: while the tenant's own line drains, every active tenant drains by its weight. O(values).
    """
    account, queue = live.account, state.queues[live.rank]
    above_us = 0
    for higher in range(live.rank):
        above_us += state.queues[higher].ready_us
    dearer_us = min(queue.ready_us, queue.waiting_us_above(live.request.value_micros))
    weights = max(account.weight, state.accountant.active_weight(live.rank))
    shared_us = queue.waiting_us_of(account) * weights // account.weight
    return above_us + dearer_us + min(queue.ready_us - dearer_us, shared_us)


def calibrated(state: EngineState, rank: int, wait_us: int, percent: int) -> int:
    """A predicted wait corrected by how earlier predictions turned out."""
    calibration = state.calibrations[rank]
    return wait_us * (calibration.q90 if percent >= 90 else calibration.q50) // ONE


def retry_after_us(state: EngineState, live: LiveRequest) -> int:
    """When one that is refused or shed may come back: once what waits now has drained by what it lacked, and not
    before those who were told so earlier.
    """
    wait_us = calibrated(state, live.rank, predicted_wait_us(state, live), 50)
    limits = [limit for limit in (latest_start_us(state, live), live.queue_wait_limit_us) if limit is not None]
    room_us = max(0, min(limits, default=live.arrival_us) - live.arrival_us)
    return state.returns[live.rank].appoint(
        live.account.tenant_id,
        wait_us=wait_us - room_us,
        cost_us=live.estimated_gpu_us,
        salt=live.sequence_number,
        now_us=state.now_us,
    )


def note_wait(state: EngineState, live: LiveRequest, now_us: int) -> None:
    """Learn from a wait that has ended, by a start or because it took too long (then it would have been longer)."""
    if live.state is State.WAITING and not live.account.at_concurrency:
        state.calibrations[live.rank].observe(predicted_us=live.predicted_wait_us, actual_us=now_us - live.arrival_us)


def note_start(state: EngineState, live: LiveRequest, now_us: int) -> None:
    """Its wait is over, and so is the promise it may have come back on."""
    note_wait(state, live, now_us)
    if live.is_promised and live.state is State.WAITING:
        state.returns[live.rank].note(is_kept=True)


def late_percent(state: EngineState) -> int:
    """The worst estimated start of a class above batch, in percent of its target to a first token."""
    worst = 0
    for rank in (PriorityClass.INTERACTIVE, PriorityClass.DEFAULT):
        target_ms = state.classes[rank].ttft_target_ms if state.queues[rank].num_waiting else None
        if target_ms is not None:
            worst = max(worst, class_wait_us(state, rank, 50) // (10 * target_ms))
    return worst


def is_closed(state: EngineState, rank: int) -> bool:
    """True when a request of the class, of an average tenant, would be refused now."""
    policy = state.classes[rank]
    queue = state.queues[rank]
    if state.draining or queue.num_waiting >= state.config.max_waiting_per_class:
        return True
    if policy.max_queue_wait_ms is None:
        return False
    share = share_of_equals(has_returns=state.returns[rank].has_open(state.now_us))
    return class_wait_us(state, rank, 50) * ONE > policy.max_queue_wait_ms * 1_000 * share


def class_wait_us(state: EngineState, rank: int, percent: int) -> int:
    """Estimated start of a request that comes last in its class."""
    wait_us = sum(state.queues[higher].ready_us for higher in range(rank + 1))
    return calibrated(state, PriorityClass(rank), wait_us, percent)
