"""What came in since the last plan: submits, cancels and timers, taken in at a step boundary.

Knows arrivals; refuses to plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple, assert_never

from scheduler_engine import admission
from scheduler_engine.deadlines import latest_start_us, set_deadlines, tightest
from scheduler_engine.events import Accepted, FinishReason, Rejected, RejectReason
from scheduler_engine.live import ON_DEVICE, LiveRequest, State
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import Request, RequestId
from scheduler_engine.state import EngineState


class Arrival(NamedTuple):
    request: Request
    arrival_us: int


class Cancellation(NamedTuple):
    request_id: RequestId
    reason: str


class ServiceElsewhere(NamedTuple):
    priority_class: PriorityClass
    tenant_id: str
    gpu_us: int


class Naming(NamedTuple):
    request_id: RequestId
    keys: Sequence[bytes]


Input = Arrival | Cancellation | ServiceElsewhere | Naming


class Intake:
    """Always: inputs take effect in the order they came, and each submitted request gets exactly one Accepted or
    Rejected.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._door = admission.Door(state)
        self._num_arrivals = 0

    def take_in(self, inputs: list[Input], now_us: int) -> None:
        for item in inputs:
            match item:
                case Arrival():
                    self._arrive(item)
                case Cancellation():
                    self._cancel(item, now_us)
                case ServiceElsewhere():
                    self._set_elsewhere(item)
                case Naming():
                    self._name(item)
                case _:
                    assert_never(item)

    def _set_elsewhere(self, item: ServiceElsewhere) -> None:
        account = self._state.account(item.priority_class, item.tenant_id)
        account.set_elsewhere(item.gpu_us)
        self._state.accountant.note_start(account)  # it may be on the device with more than was thought

    def _name(self, item: Naming) -> None:
        """Its blocks may be elsewhere by now, or its end may have come first."""
        live = self._state.lives.get(item.request_id)
        if live is not None:
            live.prefix_keys = (*live.prefix_keys, *item.keys)
            if live.state in ON_DEVICE:
                self._state.publish_prefix(live)

    def _arrive(self, arrival: Arrival) -> None:
        state, request = self._state, arrival.request
        refusal = self._door.never(request)
        if refusal is not None:
            reason, retry_after_us = refusal
            state.overload.note_shed(int(request.priority_class), reason, state.now_us, of_capacity=False)
            self._refuse(arrival, reason, retry_after_us)
            return
        live = self._live(arrival)
        state.values[live.rank].note(request.value_micros, state.now_us)
        live.is_promised = request.is_return and state.returns[live.rank].redeem(request.tenant_id, state.now_us)
        refusal = self._door.now(live)
        if refusal is not None:
            reason, retry_after_us = refusal
            state.note_refusal(live, reason, retry_after_us, state.now_us)
            self._refuse(arrival, reason, retry_after_us)
            return
        self._accept(live)

    def _refuse(self, arrival: Arrival, reason: RejectReason, retry_after_us: int | None) -> None:
        state = self._state
        state.journal.refused(arrival.request, reason, arrival.arrival_us)
        state.outbox.rejected.append(Rejected(arrival.request.request_id, reason, retry_after_us))

    def _accept(self, live: LiveRequest) -> None:
        state = self._state
        state.accountant.enter(live.account)
        state.mixes[live.rank].note(live.account.tenant_id, state.now_us)
        estimate_us = admission.calibrated(state, live.rank, live.predicted_wait_us, 50)
        position = state.queues[live.rank].num_waiting
        state.outbox.accepted.append(Accepted(live.request_id, position, estimate_us))
        state.lives[live.request_id] = live
        state.num_lives[live.rank] += 1
        state.journal.queued(live)
        state.line_up(live)
        if live.total >= live.finish_total:  # an earlier attempt had delivered all of it
            state.finish(live, FinishReason.LENGTH, state.now_us)
            return
        self._set_timer(live)

    def _live(self, arrival: Arrival) -> LiveRequest:
        state, request = self._state, arrival.request
        account = state.account(request.priority_class, request.tenant_id)
        self._num_arrivals += 1
        live = LiveRequest(request, account, sequence_number=self._num_arrivals, arrival_us=arrival.arrival_us)
        live.finish_total = min(live.limit_total, state.config.max_model_len)
        state.estimate_total(live)
        state.estimate_gpu(live)
        set_deadlines(state, live)
        return live

    def _set_timer(self, live: LiveRequest) -> None:
        soonest_us = tightest(live.queue_wait_limit_us, latest_start_us(self._state, live))
        if soonest_us is not None:
            self._state.wake_at(soonest_us, live)

    def _cancel(self, cancellation: Cancellation, now_us: int) -> None:
        """Ends a request in any state; one that has ended already is left in peace."""
        live = self._state.lives.get(cancellation.request_id)
        if live is not None:
            self._state.finish(live, FinishReason.CANCELLED, now_us, cancellation.reason)

    def expire(self, now_us: int) -> None:
        """Shed what still waits for its first start and can no longer be in time, or waited longer than it allowed."""
        state = self._state
        timers = state.timers
        while timers and timers[0][0] <= now_us:
            _, sequence_number, request_id = heapq.heappop(timers)
            live = state.lives.get(request_id)
            if live is None or live.state is not State.WAITING or live.sequence_number != sequence_number:
                continue
            is_out = live.queue_wait_limit_us is not None and live.queue_wait_limit_us <= now_us
            reason = RejectReason.QUEUE_WAIT if is_out else RejectReason.LATE
            admission.note_wait(state, live, now_us)
            state.reject(live, reason, admission.retry_after_us(state, live), now_us)

    def hand_back(self, now_us: int) -> None:
        """Draining: whoever has not started, here or elsewhere, is handed back, to be sent to another worker."""
        for queue in self._state.queues:
            for live in queue.waiting():
                if live.state is State.WAITING and not live.request.has_started:
                    self._state.reject(live, RejectReason.DRAINING, 1_000_000, now_us)
