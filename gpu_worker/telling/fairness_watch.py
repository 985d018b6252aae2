"""How far apart the tenants of a class are in service, and what each has had: read off the engine for the boards.

Knows charges and policies; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_engine.load import TenantLoad
from scheduler_engine.policy import ClassPolicy, PriorityClass
from scheduler_engine.scheduler import Scheduler
from wire.messages import MOST_TENANTS, TenantSnapshot

REFRESH_US = 1_000_000


def gap_bound_us(policy: ClassPolicy, *, num_slots: int, longest_step_us: int, least_weight: int = 1) -> int:
    """What the gap cannot pass (docs/scheduling.md): twice B + (quantum + slots + 1) steps of the longest kind, where
    one head a step may push out a tenant of its own class.
    """
    drain_us = (policy.quantum_steps + num_slots + 1) * longest_step_us // least_weight
    return 2 * (policy.fairness_gap_ms * 1_000 + drain_us)


class FairnessWatch:
    """What was read last. Always: a tenant that was named once stays named, so that no count of it ever falls; the
    device time of all rows is what was charged when they were read, each rounded down.
    """

    def __init__(self) -> None:
        self.tenants: tuple[TenantSnapshot, ...] = ()
        self.gaps_us = [0 for _ in PriorityClass]
        self._read_at_us: int | None = None

    def look(self, scheduler: Scheduler, now_us: int) -> None:
        """Once a second at most. O(tenants)."""
        if self._read_at_us is not None and now_us - self._read_at_us < REFRESH_US:
            return
        self._read_at_us = now_us
        self.tenants = bounded(scheduler.tenants())
        for priority_class in PriorityClass:
            services = [service_us for _, service_us in scheduler.waiting_services(priority_class)]
            self.gaps_us[priority_class] = max(services) - min(services) if services else 0


def bounded(loads: Sequence[TenantLoad], most: int = MOST_TENANTS) -> tuple[TenantSnapshot, ...]:
    """The first ``most``, each by name, and the sum of the others under no name."""
    rows = [
        TenantSnapshot(tenant_id=load.tenant_id, gpu_us=load.gpu_us, weight=load.weight, num_live=load.num_live)
        for load in loads[:most]
    ]
    others = loads[most:]
    if others:
        gpu_us = tuple(sum(load.gpu_us[rank] for load in others) for rank in PriorityClass)
        weight, num_live = sum(load.weight for load in others), sum(load.num_live for load in others)
        rows.append(TenantSnapshot(tenant_id="", gpu_us=gpu_us, weight=weight, num_live=num_live))
    return tuple(rows)
