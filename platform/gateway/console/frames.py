"""One worker as a frame of the live page: plain data made from its newest snapshot and from two earlier ones.

Knows what an operator asks of the numbers (rates, quantiles against targets, shares against entitlements); refuses to
know when snapshots come and who looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.console.quantiles import quantile_ms, since
from wire.messages import ClassSnapshot, Histogram, LoadSnapshot, PolicyNews, TenantSnapshot

LEAST_SPAN_US = 1_000_000
RECENT_WINDOW_US = 60_000_000
SILENT_AFTER_US = 2_000_000
MOST_TENANTS_SHOWN = 10
QUANTILES = (50, 95, 99)

Frame = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A snapshot and when it was heard."""

    at_us: int
    load: LoadSnapshot


def worker_frame(newest: Reading, lately: Reading, minute: Reading, now_us: int) -> Frame:
    """Durations in milliseconds. ``lately`` and ``minute``: readings some five seconds and a minute older, for rates
    and for recent quantiles. ``recent_ms``: how much of that minute has been seen.
    """
    load, age_us = newest.load, now_us - newest.at_us
    span_us = newest.at_us - lately.at_us
    return {
        "id": load.worker_id,
        "epoch": load.epoch,
        "model": load.model,
        "version": load.version,
        "state": _state(load, age_us),
        "age_ms": age_us // 1_000,
        "heard_at_ms": newest.at_us // 1_000,
        "recent_ms": min(RECENT_WINDOW_US // 1_000, newest.at_us // 1_000 - minute.at_us // 1_000),
        "up_ms": (load.epoch_age_us + age_us) // 1_000,
        "step": load.step,
        "step_age_ms": (load.last_step_age_us + age_us) // 1_000,
        "policy_version": load.policy_version,
        "slots": {"total": load.num_slots, "used": load.num_slots - load.num_free_slots},
        "device": {"total": load.num_blocks, "used": load.num_blocks - load.num_free_blocks},
        "host": {"total": load.num_host_blocks, "used": load.num_host_blocks - load.num_free_host_blocks},
        "output_per_s": _per_second(load.output_tokens_total - lately.load.output_tokens_total, span_us),
        "prompt_per_s": _per_second(load.prompt_tokens_total - lately.load.prompt_tokens_total, span_us),
        "busy_percent": _share(load.busy_us_total - lately.load.busy_us_total, span_us),
        "policy": _policy(load.policy),
        "classes": _classes(newest, lately, minute),
        "tenants": _tenants(newest.load.tenants, minute.load.tenants),
        "board": [
            [
                row.response_id,
                row.tenant_id,
                row.priority_class.label,
                row.state,
                row.num_blocks,
                row.num_computed_tokens,
                row.num_output_tokens,
            ]
            for row in load.board
        ],
    }


def _state(load: LoadSnapshot, age_us: int) -> str:
    if age_us > SILENT_AFTER_US:
        return "silent"
    if load.draining:
        return "draining"
    return "ready" if load.ready else "starting"


def _policy(news: PolicyNews) -> Frame:
    return {
        "rung": news.rung,
        "batch_paused_ms": news.batch_paused_us // 1_000,
        "batch_pauses": news.num_batch_pauses,
        "switching_percent": news.switching_per_mille / 10,
        "governor_cuts": news.num_governor_cuts,
    }


def _classes(newest: Reading, lately: Reading, minute: Reading) -> list[Frame]:
    before = {row.priority_class: row for row in lately.load.classes}
    earlier = {row.priority_class: row for row in minute.load.classes}
    span_us = newest.at_us - lately.at_us
    return [
        _class(row, before[row.priority_class], earlier[row.priority_class], span_us, newest.load.policy)
        for row in newest.load.classes
    ]


def _class(now: ClassSnapshot, lately: ClassSnapshot, minute: ClassSnapshot, span_us: int, news: PolicyNews) -> Frame:
    label = now.priority_class.label
    sheds = [(rung, reason, count) for name, rung, reason, count in news.sheds if name == label]
    return {
        "class": label,
        "waiting": now.num_waiting,
        "running": now.num_running,
        "suspended": now.num_suspended,
        "slot_cap": now.slot_cap,
        "closed": now.closed,
        "retry_after_ms": None if now.retry_after_us is None else now.retry_after_us // 1_000,
        "queue_wait": _latency(since(now.queue_wait, minute.queue_wait), None),
        "ttft": _latency(since(now.ttft, minute.ttft), now.ttft_target_us),
        "tpot": _latency(since(now.tpot, minute.tpot), now.tpot_target_us),
        "ttft_ms": _quantiles(now.ttft),
        "output_per_s": _per_second(now.output_tokens - lately.output_tokens, span_us),
        "preemptions": _summed((lever, count) for lever, _resource, count in now.preemptions),
        "preempted_by": _summed((resource, count) for _lever, resource, count in now.preemptions),
        "shed": _summed(now.shed),
        "shed_by_rung": _summed((f"{rung}: {reason}", count) for rung, reason, count in sheds),
        "floor_debt_ms": now.floor_debt_us // 1_000,
        "promises": [now.num_promises_kept, now.num_promises_broken],
        "gap_ms": now.fairness_gap_us // 1_000,
        "gap_bound_ms": now.fairness_bound_us // 1_000,
    }


def _latency(recent: Histogram, target_us: int | None) -> Frame:
    """Quantiles of the last minute, the target, and the names of those above it."""
    quantiles = _quantiles(recent)
    target_ms = None if target_us is None else target_us // 1_000
    over = [
        f"p{percent}"
        for percent, value_ms in zip(QUANTILES, quantiles, strict=True)
        if value_ms is not None and target_ms is not None and value_ms > target_ms
    ]
    return {"recent_ms": quantiles, "target_ms": target_ms, "over": over}


def _quantiles(histogram: Histogram) -> list[int | None]:
    return [quantile_ms(histogram, percent) for percent in QUANTILES]


def _tenants(now: Sequence[TenantSnapshot], minute: Sequence[TenantSnapshot]) -> list[list[Any]]:
    """[tenant or "", live requests, GPU-ms of the last minute, its share and its entitled share in %, GPU-ms in all].

    Those that had most of the last minute first, and the rest as one row without a name. Entitled: weight over the
    weights of all that have anything here now; None for one that has not. What was had is never below 0, whatever a
    worker tells.
    """
    before = {row.tenant_id: sum(row.gpu_us) for row in minute}
    rows = [(row, max(0, sum(row.gpu_us) - before.get(row.tenant_id, 0))) for row in now]
    all_us = sum(recent_us for _, recent_us in rows)
    all_weight = sum(row.weight for row in now)
    rows.sort(key=lambda pair: (pair[0].tenant_id == "", -pair[1], -sum(pair[0].gpu_us)))
    shown = [row for row in rows if row[0].tenant_id][:MOST_TENANTS_SHOWN]
    frames = [_tenant([row], all_us, all_weight) for row in shown]
    rest = rows[len(shown) :]
    return [*frames, _tenant(rest, all_us, all_weight)] if rest else frames


def _tenant(rows: Sequence[tuple[TenantSnapshot, int]], all_us: int, all_weight: int) -> list[Any]:
    recent_us = sum(recent for _, recent in rows)
    weight = sum(row.weight for row, _ in rows)
    return [
        rows[0][0].tenant_id if len(rows) == 1 else "",
        sum(row.num_live for row, _ in rows),
        recent_us // 1_000,
        round(100 * recent_us / all_us, 1) if all_us else None,
        round(100 * weight / all_weight, 1) if weight else None,
        sum(sum(row.gpu_us) for row, _ in rows) // 1_000,
    ]


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for word, count in pairs:
        sums[word] = sums.get(word, 0) + count
    return sums


def _per_second(count: int, span_us: int) -> float | None:
    """To one decimal; None until two readings lie a second apart, for a rate over less is noise."""
    if span_us < LEAST_SPAN_US:
        return None
    return round(count * 1_000_000 / span_us, 1)


def _share(busy_us: int, span_us: int) -> int | None:
    if span_us < LEAST_SPAN_US:
        return None
    return min(100, busy_us * 100 // span_us)
