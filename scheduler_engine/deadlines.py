"""What a request is promised in time: to its start, to its first token, to its last.

Knows deadlines and the time a request needs by itself; refuses to know who else waits.
"""

from __future__ import annotations

from scheduler_engine.cost import to_us
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.state import EngineState


def set_deadlines(state: EngineState, live: LiveRequest) -> None:
    """From the request, its tenant and its class, once, at arrival: nothing that orders changes with time."""
    request, policy = live.request, state.classes[live.rank]
    target_us = request.deadline_us
    if target_us is None and policy.ttft_target_ms is not None:
        target_us = policy.ttft_target_ms * 1_000
    hard_us = tightest(request.hard_deadline_us, live.account.hard_deadline_us, _us(policy.hard_deadline_ms))
    wait_us = tightest(request.max_queue_wait_us, _us(policy.max_queue_wait_ms))
    completion_us = request.completion_deadline_us
    live.hard_deadline_us = None if hard_us is None else live.arrival_us + hard_us
    live.queue_wait_limit_us = None if wait_us is None else live.arrival_us + wait_us
    live.completion_deadline_us = None if completion_us is None else live.arrival_us + completion_us
    if target_us is not None:
        live.deadline_us = live.arrival_us + target_us
    if live.completion_deadline_us is not None:
        live.deadline_us = min(live.deadline_us, live.completion_deadline_us - own_output_us(state, live))
    if request.has_started:  # from then on deadlines only order
        live.hard_deadline_us = live.queue_wait_limit_us = live.completion_deadline_us = None


def tightest(*limits: int | None) -> int | None:
    """The least of those there are."""
    found: int | None = None
    for limit in limits:
        if limit is not None and (found is None or limit < found):
            found = limit
    return found


def _us(duration_ms: int | None) -> int | None:
    return None if duration_ms is None else duration_ms * 1_000


def own_prefill_us(state: EngineState, live: LiveRequest) -> int:
    """How long its own prefill keeps a request from its first token, with the fixed cost of its steps, alone."""
    num_steps = max(1, -(-live.rest // state.classes[live.rank].chunk_max))
    return to_us(state.cost.prefill_ns(live.computed, live.rest) + num_steps * state.cost.base_ns)


def own_output_us(state: EngineState, live: LiveRequest) -> int:
    """How long its output is expected to take from the first token to the last, at the pace of recent steps."""
    return max(0, live.estimated_total - live.total - 1) * state.cost.step_us


def latest_start_us(state: EngineState, live: LiveRequest) -> int | None:
    """The last moment at which a start keeps its hard promises; None where it has none."""
    if live.hard_deadline_us is None and live.completion_deadline_us is None:
        return None
    prefill_us = own_prefill_us(state, live)
    first_us = None if live.hard_deadline_us is None else live.hard_deadline_us - prefill_us
    last_us = None
    if live.completion_deadline_us is not None:
        last_us = live.completion_deadline_us - prefill_us - own_output_us(state, live)
    return tightest(first_us, last_us)


def is_late(state: EngineState, live: LiveRequest, *, count: int, granted_ns: int) -> bool:
    """The second shedding point, just before prefill: can it still be in time? Never for one that has run.

    ``granted_ns``: predicted cost of the step so far; the step would take ``count`` tokens of this request on top.
    """
    if live.state is not State.WAITING or (live.hard_deadline_us is None and live.completion_deadline_us is None):
        return False
    cost = state.cost
    needed_ns = granted_ns + cost.prefill_ns(live.computed, count)
    rest = live.rest - count
    if rest:
        num_more_steps = -(-rest // state.classes[live.rank].chunk_max)
        needed_ns += cost.prefill_ns(live.computed + count, rest) + num_more_steps * cost.base_ns
    first_token_us = state.now_us + to_us(needed_ns)
    if live.hard_deadline_us is not None and first_token_us > live.hard_deadline_us:
        return True
    completion_us = live.completion_deadline_us
    return completion_us is not None and first_token_us + own_output_us(state, live) > completion_us


def must_be_relegated(state: EngineState, live: LiveRequest) -> bool:
    """True for one that has streamed nothing and will miss its soft deadline whatever is done: those of its tenant
    that can still be in time go first (relegation, after the Niyama scheduler). Not one with a hard deadline: it was
    let in on the promise that nobody would overtake it.
    """
    is_fresh = live.state is State.WAITING and not live.is_relegated
    has_promise = live.hard_deadline_us is not None or live.completion_deadline_us is not None
    return is_fresh and not has_promise and state.now_us + own_prefill_us(state, live) > live.deadline_us


def relegate(state: EngineState, live: LiveRequest) -> None:
    """To the end of its tenant's line, once; there by the same key."""
    queue = state.queues[live.rank]
    queue.remove(live)
    live.is_relegated = True
    state.tally.num_relegations += 1
    queue.push(live)
