"""A simulation as one line of JSON, and as a table for a person. Durations are simulated; only ``cpu_s`` is real."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu_worker.simulation.clients import View, quantiles_ms
from gpu_worker.simulation.run import Outcome
from gpu_worker.telling.fairness_watch import gap_bound_us
from scheduler_engine.policy import PriorityClass
from wire.messages import Usage


def report(outcome: Outcome, *, story: str, seed: int) -> dict[str, Any]:
    """The JSON line. ``requests`` are of clients: one that came back after a refusal is still the same request."""
    clients = outcome.clients
    virtual_s = outcome.virtual_us / 1_000_000
    everybody = clients.all()
    return {
        "story": story,
        "device": outcome.device.name,
        "seed": seed,
        "virtual_s": round(virtual_s, 3),
        "cpu_s": round(outcome.cpu_s, 2),
        "steps": outcome.timeline.step_us.total(),
        "step_ms": quantiles_ms(outcome.timeline.step_us),
        "classes": {
            priority_class.label: _class_row(view)
            for priority_class in PriorityClass
            if (view := clients.of_class(priority_class)).requests
        },
        "tenants": _tenants(outcome),
        "preemptions": _preemptions(outcome),
        **_calm(outcome.usages),
        "fairness_gap_ms": _fairness_gap_ms(outcome),
        "goodput_per_s": _goodput_per_s(outcome),
        "late": everybody.late,
        "refusals": dict(sorted(everybody.refusals.items())),
        "refusals_without_retry_after": everybody.no_hint,
        "retry_promise_kept": round(everybody.returns_kept / everybody.returns, 4) if everybody.returns else None,
        "digest": outcome.digest,
        "books_balanced": True,  # the run raises otherwise
    }


def _class_row(view: View) -> dict[str, Any]:
    return {
        "requests": view.requests,
        "completed": view.completed,
        "shed": view.shed,
        "tokens": view.tokens,
        "tokens_per_s": round(view.tokens / _span_s(view), 1),
        "ttft_ms": quantiles_ms(view.ttft),
        "itl_ms": quantiles_ms(view.gaps),
        "queue_wait_ms": quantiles_ms(view.queue_wait),
    }


def _span_s(view: View) -> float:
    """From the first arrival to the last end, in seconds."""
    return max(1, view.last_end_us - (view.first_at_us or 0)) / 1_000_000


def _tenants(outcome: Outcome) -> dict[str, dict[str, Any]]:
    used: dict[str, list[int]] = {}
    for usage in outcome.usages:
        row = used.setdefault(usage.tenant_id, [0, 0])
        row[0] += usage.counters.gpu_us
        row[1] += usage.prompt_tokens + usage.output_tokens
    rows = {}
    for tenant_id, (gpu_us, tokens) in sorted(used.items()):
        view = outcome.clients.of_key(tenant_id)
        rows[tenant_id] = {
            "gpu_s": round(gpu_us / 1_000_000, 6),
            "tokens": tokens,
            "requests": view.requests,
            "completed": view.completed,
            "shed": view.shed,
            "ttft_ms": quantiles_ms(view.ttft),
        }
    return rows


def _preemptions(outcome: Outcome) -> dict[str, int]:
    """By lever; ``step_hold`` is a hold of single steps, which gives up nothing but its place in them."""
    found: Counter[str] = Counter()
    for counters in outcome.telemetry.classes.values():
        for (lever, resource), count in counters.preemptions.items():
            found["step_hold" if (lever, resource) == ("hold", "step_time") else lever] += count
    return dict(sorted(found.items()))


def _calm(usages: Sequence[Usage]) -> dict[str, Any]:
    """How often requests lost their memory, and what was computed twice."""
    counts = [usage.counters.num_swaps + usage.counters.num_recomputes for usage in usages]
    computed = sum(usage.prompt_tokens + usage.output_tokens for usage in usages)
    recomputed = sum(usage.counters.recomputed_tokens for usage in usages)
    return {
        "preempted_share": round(sum(count > 0 for count in counts) / max(1, len(counts)), 4),
        "preempted_most": max(counts, default=0),
        "recomputed_tokens": recomputed,
        "recomputed_share": round(recomputed / max(1, computed + recomputed), 5),
    }


def _fairness_gap_ms(outcome: Outcome) -> dict[str, float]:
    """Of the class in which it was largest."""
    gaps_us = outcome.gap.largest_us
    widest = max(PriorityClass, key=lambda priority_class: gaps_us[priority_class])
    bound_us = gap_bound_us(
        outcome.policy.classes[widest],
        num_slots=outcome.device.num_slots,
        longest_step_us=max(outcome.timeline.step_us, default=0),
    )
    return {"max": gaps_us[widest] / 1_000, "bound": bound_us / 1_000}


def _goodput_per_s(outcome: Outcome) -> float:
    """First tokens that came in time, a second: of all classes that promise one or requests that have a deadline."""
    views = [view for view in outcome.clients.views.values() if view.on_time or view.late]
    total = View()
    for view in views:
        total.add(view)
    return round(total.on_time.total() / _span_s(total), 3)


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{result['story']} on {result['device']}, seed {result['seed']}: {result['steps']} steps, "
        f"{result['virtual_s']:.0f} s simulated in {result['cpu_s']} s of CPU",
        f"{'class':<12}{'requests':>9}{'done':>7}{'shed':>6}{'tokens/s':>10}"
        f"{'TTFT p50':>14}{'p99':>14}{'max':>14}{'ITL p99':>10}",
    ]
    for label, row in result["classes"].items():
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        cells = [ms(ttft["p50"]), ms(ttft["p99"]), ms(ttft["max"]), ms(itl["p99"])]
        lines.append(
            f"{label:<12}{row['requests']:>9}{row['completed']:>7}{row['shed']:>6}{row['tokens_per_s']:>10}"
            f"{cells[0]:>14}{cells[1]:>14}{cells[2]:>14}{cells[3]:>10}"
        )
    levers = ", ".join(f"{count} by {lever}" for lever, count in result["preemptions"].items()) or "none"
    lines.append(f"preemptions: {levers}; {result['recomputed_tokens']} tokens recomputed; books balanced")
    gap, kept = result["fairness_gap_ms"], result["retry_promise_kept"]
    refused = ", ".join(f"{count} {reason}" for reason, count in result["refusals"].items()) or "none"
    lines.append(
        f"fairness gap: {ms(gap['max'])} of at most {ms(gap['bound'])}; on time: {result['goodput_per_s']} a second; "
        f"refusals: {refused}" + ("" if kept is None else f"; Retry-After kept: {kept:.1%}")
    )
    return "\n".join(lines)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"
