"""Curves of a run, as plain numbers: how soon first tokens come, who is in the batch, who has the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_worker.simulation.run import Charges
from gpu_worker.simulation.watch import Second
from scheduler_engine.policy import PriorityClass

NUM_BINS = 160


def cumulative(counts: Mapping[int, int]) -> tuple[list[float], list[float]]:
    """(milliseconds, share of all that took no longer), ascending."""
    total, seen = sum(counts.values()), 0
    values, shares = [], []
    for value_us in sorted(counts):
        seen += counts[value_us]
        values.append(value_us / 1_000)
        shares.append(seen / total)
    return values, shares


def bins_of(last_second: int) -> list[range]:
    """The run's seconds in at most NUM_BINS equal bins."""
    width = max(1, -(-(last_second + 1) // NUM_BINS))
    return [range(start, start + width) for start in range(0, last_second + 1, width)]


def composition(
    seconds: Mapping[int, Second], bins: Sequence[range]
) -> tuple[dict[PriorityClass, list[float]], dict[PriorityClass, list[float]]]:
    """Per class and bin: decodes a step in the mean, and prefill tokens a second. 0 where nothing ran."""
    decodes: dict[PriorityClass, list[float]] = {priority_class: [] for priority_class in PriorityClass}
    prefill: dict[PriorityClass, list[float]] = {priority_class: [] for priority_class in PriorityClass}
    for each in bins:
        found = [seconds[second] for second in each if second in seconds]
        steps = sum(second.steps for second in found)
        for priority_class in PriorityClass:
            rows = sum(second.decodes[priority_class] for second in found)
            decodes[priority_class].append(rows / steps if steps else 0.0)
            prefill[priority_class].append(sum(second.prefill[priority_class] for second in found) / len(each))
    return decodes, prefill


def shares(charges: Mapping[int, Charges], bins: Sequence[range], *, most: int = 6) -> dict[str, list[float]]:
    """Per tenant and bin: device time as a share of the bin. Beyond the ``most`` largest they are one, "others"."""
    cumulated = [_tenants(_at(charges, each.start)) for each in bins]
    cumulated.append(_tenants(_at(charges, bins[-1].stop) if bins else {}))
    order = sorted(cumulated[-1], key=lambda tenant_id: -cumulated[-1][tenant_id])
    rows = {tenant_id: [0.0] * len(bins) for tenant_id in order[:most]}
    for i, each in enumerate(bins):
        for tenant_id in order:
            used_us = cumulated[i + 1].get(tenant_id, 0) - cumulated[i].get(tenant_id, 0)
            row = rows.setdefault(tenant_id if tenant_id in order[:most] else "others", [0.0] * len(bins))
            row[i] += used_us / (len(each) * 1_000_000)
    return rows


def _at(charges: Mapping[int, Charges], second: int) -> Charges:
    """As they stood when the second began; of the last that is known before it where nothing ran."""
    known = [each for each in charges if each <= second]
    return charges[max(known)] if known else {}


def _tenants(charges: Charges) -> dict[str, int]:
    totals: dict[str, int] = {}
    for (_, tenant_id), charge_us in charges.items():
        totals[tenant_id] = totals.get(tenant_id, 0) + charge_us
    return totals
