"""What operators may edit: class parameters and per-tenant quotas, as frozen values.

Knows units and defaults (docs/policy.md has the table); refuses to know where a policy is stored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class PriorityClass(enum.IntEnum):
    """A closed set; the value is the rank, 0 is most urgent."""

    INTERACTIVE = 0
    DEFAULT = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """The name on every border: ``interactive``, ``default``, ``batch``."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> PriorityClass:
        """Inverse of ``label``. Raises ValueError naming the accepted words."""
        for priority_class in cls:
            if priority_class.label == label:
                return priority_class
        raise ValueError(f"priority_class must be interactive, default or batch, not {label!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPolicy:
    """Parameters of one class. ``None`` is "no limit" or "none", 0 is "nothing"."""

    priority_class: PriorityClass
    ttft_target_ms: int | None
    tbt_target_ms: int | None
    hard_deadline_ms: int | None
    max_queue_wait_ms: int | None
    floor_percent: int
    cap_slots_percent: int
    cap_memory_percent: int
    patience_steps: int | None  # both patience fields None: this class never preempts
    patience_ms: int | None
    fairness_gap_ms: int  # B, in GPU-milliseconds
    quantum_steps: int
    step_cap_percent: int  # sigma: a step takes at most this share of the tightest active target
    token_budget_max: int
    chunk_max: int
    chunk_min: int
    bypass_limit: int
    max_preemptions: int
    governor_on_percent: int
    governor_off_percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantClassPolicy:
    """One cell of the quota matrix, tenant x class. ``None`` = no limit, 0 = nothing allowed."""

    tenant_id: str
    priority_class: PriorityClass
    allowed: bool = True
    weight: int = 1
    value_micros: int = 1  # worth of one token when overload forces a choice
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    money_micros: int | None = None
    money_window: Literal["day", "month"] = "month"
    default_max_tokens: int = 512
    max_tokens_cap: int | None = None
    hard_deadline_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySnapshot:
    """A whole policy at one version. Always: exactly one ClassPolicy per class, in rank order."""

    version: int
    classes: tuple[ClassPolicy, ClassPolicy, ClassPolicy]
    tenants: tuple[TenantClassPolicy, ...] = ()


def gpu_classes() -> tuple[ClassPolicy, ClassPolicy, ClassPolicy]:
    """Defaults for a GPU: 300 ms to the first interactive token, 50 ms between tokens."""
    return _classes((300, 2_000), (50, 200), (10_000, 60_000), 1_000, 16, (2_048, 1_024, 64))


def cpu_classes() -> tuple[ClassPolicy, ClassPolicy, ClassPolicy]:
    """Defaults for the small model on a CPU (profile ``cpu-smollm2``): steps are tens of times longer."""
    return _classes((3_000, 10_000), (1_000, 2_000), (60_000, 300_000), 10_000, 8, (256, 128, 16))


def _classes(
    ttft: tuple[int, int],
    tbt: tuple[int, int],
    queue: tuple[int, int],
    gap_ms: int,
    quantum: int,
    tokens: tuple[int, int, int],
) -> tuple[ClassPolicy, ClassPolicy, ClassPolicy]:
    def row(
        priority_class: PriorityClass,
        ttft_ms: int | None,
        tbt_ms: int | None,
        queue_ms: int | None,
        floor: int,
        cap_memory: int,
        patience_steps: int | None,
        patience_ms: int | None,
    ) -> ClassPolicy:
        return ClassPolicy(
            priority_class=priority_class,
            ttft_target_ms=ttft_ms,
            tbt_target_ms=tbt_ms,
            hard_deadline_ms=None,
            max_queue_wait_ms=queue_ms,
            floor_percent=floor,
            cap_slots_percent=100,
            cap_memory_percent=cap_memory,
            patience_steps=patience_steps,
            patience_ms=patience_ms,
            fairness_gap_ms=gap_ms,
            quantum_steps=quantum,
            step_cap_percent=15,
            token_budget_max=tokens[0],
            chunk_max=tokens[1],
            chunk_min=tokens[2],
            bypass_limit=8,
            max_preemptions=4,
            governor_on_percent=5,
            governor_off_percent=2,
        )

    return (
        row(PriorityClass.INTERACTIVE, ttft[0], tbt[0], queue[0], 0, 100, 2, None),
        row(PriorityClass.DEFAULT, ttft[1], tbt[1], queue[1], 20, 94, None, 1_000),
        row(PriorityClass.BATCH, None, None, None, 5, 94, None, None),
    )
