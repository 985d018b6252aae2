"""The engine's load, read off its state.

Knows where each number of EngineLoad comes from; changes nothing.
"""

from __future__ import annotations

from scheduler_engine import admission
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.load import BoardRow, ClassLoad, EngineLoad, PolicyLoad, PreemptionCount, ShedCount, TenantLoad
from scheduler_engine.metering import UNIT_BITS
from scheduler_engine.policy import PriorityClass
from scheduler_engine.returns import spread
from scheduler_engine.state import EngineState

_STATE_NAMES = {
    State.PREFILL: "prefill",
    State.DECODE: "decode",
    State.HELD: "held",
    State.SAVING: "on_host",
    State.ON_HOST: "on_host",
    State.DROPPED: "dropped",
}


def measure(state: EngineState, now_us: int) -> EngineLoad:
    """O(live requests): called a few times a second."""
    board = tuple(_board_row(state, live) for live in state.lives.values() if live.state is not State.WAITING)
    return EngineLoad(
        step=state.step,
        num_blocks=state.device.num_blocks,
        num_free_blocks=state.device.num_free,
        num_host_blocks=state.host.num_blocks,
        num_free_host_blocks=state.host.num_free,
        num_slots=state.config.num_slots,
        num_free_slots=state.config.num_slots - state.running.num_slots_used,
        busy_us=state.accountant.busy_us,
        charged_us=state.accountant.charged_us,
        classes=tuple(_class_load(state, rank) for rank in PriorityClass),
        board=board,
        policy=_policy_load(state),
        num_checkpoint_blocks=state.checkpoints.num_blocks,
        checkpoint_lag_blocks=state.checkpoints.lag(state.lives, state.config.block_size),
        num_blocks_saved_ahead=state.checkpoints.num_ever,
    )


def measure_tenants(state: EngineState) -> list[TenantLoad]:
    """In the order of their first requests. O(accounts).

    Whole microseconds that each account has filled: no count falls from one reading to the next, and their sum lacks
    less than a microsecond an account of what was charged in all.
    """
    gpu_us: dict[str, list[int]] = {}
    weights: dict[str, tuple[int, int]] = {}
    for account in state.accountant:
        row = gpu_us.setdefault(account.tenant_id, [0 for _ in PriorityClass])
        row[account.priority_class] += account.charged >> UNIT_BITS
        weights[account.tenant_id] = (account.total.weight, account.total.num_live)
    return [
        TenantLoad(tenant_id, tuple(row), weight if num_live else 0, num_live)
        for tenant_id, row in gpu_us.items()
        for weight, num_live in (weights[tenant_id],)
    ]


def _policy_load(state: EngineState) -> PolicyLoad:
    overload, tally = state.overload, state.tally
    sheds = [(*key, count) for key, count in overload.sheds.items()]
    preemptions = [(*key, count) for key, count in tally.preemptions.items()]
    return PolicyLoad(
        rung=overload.rung.name.lower(),
        batch_paused_us=overload.paused_us,
        num_batch_pauses=overload.num_pauses,
        switching_per_mille=state.governor.lost_per_mille,
        num_governor_cuts=state.governor.num_cuts,
        num_bypasses=tally.num_bypasses,
        num_relegations=tally.num_relegations,
        num_kept_out=tally.num_kept_out,
        num_rests=tally.num_rests,
        sheds=tuple(ShedCount(rank, rung.name.lower(), reason.value, count) for rank, rung, reason, count in sheds),
        preemptions=tuple(
            PreemptionCount(rank, by_class, resource.value, lever.value, count)
            for rank, by_class, resource, lever, count in preemptions
        ),
    )


def _class_load(state: EngineState, rank: PriorityClass) -> ClassLoad:
    is_closed = admission.is_closed(state, rank)
    likely_us = admission.class_wait_us(state, rank, 50)
    num_sitting_out = len(state.running.step_held[rank])  # they keep their slots for the step
    num_saving = sum(state.lives[i].rank == rank for i in state.fences if i in state.lives)
    return ClassLoad(
        priority_class=rank,
        num_waiting=state.queues[rank].num_waiting - (state.num_suspended[rank] - num_saving),
        num_running=state.running.num_in_slots(rank) - num_sitting_out,
        num_suspended=state.num_suspended[rank] + num_sitting_out,
        waiting_gpu_us=state.queues[rank].waiting_us,
        estimated_start_q50_us=likely_us,
        estimated_start_q90_us=admission.class_wait_us(state, rank, 90),
        closed=is_closed,
        retry_after_us=spread(wait_us=likely_us, salt=state.step) if is_closed else None,
        floor_debt_us=state.floors.debt_us(rank),
        reserve_blocks=state.headroom.reserve(rank, state.now_us),
        slot_cap=min(state.slot_cap(rank), state.governor.cap(rank)),
        num_promises_kept=state.returns[rank].num_kept,
        num_promises_broken=state.returns[rank].num_broken,
    )


def _board_row(state: EngineState, live: LiveRequest) -> BoardRow:
    name = "held" if live.request_id in state.running.step_held[live.rank] else _STATE_NAMES[live.state]
    return BoardRow(
        request_id=live.request_id,
        tenant_id=live.account.tenant_id,
        priority_class=live.request.priority_class,
        state=name,
        num_blocks=len(live.block_table),
        num_computed_tokens=live.computed,
        num_output_tokens=len(live.output_ids),
    )
