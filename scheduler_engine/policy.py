"""What operators may edit: class parameters and per-tenant quotas, as frozen values.

Knows units and defaults (the admin lists them with their ranges); refuses to know where a policy is stored.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from scheduler_engine.errors import PolicyError as PolicyError


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


RANKS = tuple(map(int, PriorityClass))  # plain numbers, most urgent first: each step walks them often


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
    step_cap_percent: int  # sigma: share of the tightest active target a step may take (bounds: budget.py)
    token_budget_max: int
    chunk_max: int
    chunk_min: int
    bypass_limit: int
    max_preemptions: int
    governor_on_percent: int
    governor_off_percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantClassPolicy:
    """One cell of the quota matrix, tenant x class. ``None`` = no limit, 0 = nothing allowed.

    ``overflow_to``: the lower class that serves what this one's own limits would refuse; None: it is refused.
    """

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
    overflow_to: PriorityClass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySnapshot:
    """A whole policy at one version. Always: exactly one ClassPolicy per class, in rank order."""

    version: int
    classes: tuple[ClassPolicy, ClassPolicy, ClassPolicy]
    tenants: tuple[TenantClassPolicy, ...] = ()


def gpu_classes() -> tuple[ClassPolicy, ClassPolicy, ClassPolicy]:
    """Defaults for a GPU: 300 ms to the first interactive token, 50 ms between tokens."""
    return _classes((300, 2_000), (50, 200), (10_000, 60_000), 1_000, 16, (2_048, 1_024, 64), 30)


def cpu_classes() -> tuple[ClassPolicy, ClassPolicy, ClassPolicy]:
    """Defaults for the small model on a CPU (profile ``cpu-smollm2``): steps are tens of times longer.

    A step is capped near the length of a chat's own prefill: who arrives in the middle of one waits at most as long
    again.
    """
    return _classes((3_000, 10_000), (1_000, 2_000), (60_000, 300_000), 10_000, 8, (256, 128, 16), 7)


def _classes(
    ttft: tuple[int, int],
    tbt: tuple[int, int],
    queue: tuple[int, int],
    gap_ms: int,
    quantum: int,
    tokens: tuple[int, int, int],
    step_cap_percent: int,
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
            step_cap_percent=step_cap_percent,
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


def snapshot_to_dict(snapshot: PolicySnapshot) -> dict[str, Any]:
    """Plain data for JSON: class rows by label, tenant rows with their class as a label. Inverse of
    ``snapshot_from_dict``.
    """
    return {
        "version": snapshot.version,
        "classes": {
            row.priority_class.label: {
                field.name: getattr(row, field.name) for field in fields(row) if field.name != "priority_class"
            }
            for row in snapshot.classes
        },
        "tenants": [
            {field.name: getattr(row, field.name) for field in fields(row)}
            | {"priority_class": row.priority_class.label}
            | {"overflow_to": None if row.overflow_to is None else row.overflow_to.label}
            for row in snapshot.tenants
        ],
    }


def snapshot_from_dict(document: object) -> PolicySnapshot:
    """A policy from plain data. Raises PolicyError naming the field and what would be right; unknown fields are
    refused.
    """
    whole = _mapping(document, "policy")
    _known(whole, {"version", "classes", "tenants"}, "policy")
    version = _integer(whole.get("version"), "version", 0, None)
    rows = _mapping(whole.get("classes"), "classes")
    labels = [priority_class.label for priority_class in PriorityClass]
    _known(rows, set(labels), "classes")
    interactive, default, batch = (_class_policy(rows.get(label), PriorityClass.from_label(label)) for label in labels)
    classes = (interactive, default, batch)
    total_floor = sum(row.floor_percent for row in classes)
    if total_floor > 100:
        raise PolicyError(f"classes: floor_percent of all classes must sum to at most 100, not {total_floor}")
    cells = whole.get("tenants", [])
    if not isinstance(cells, list | tuple):
        raise PolicyError(f"tenants must be a list of rows, not {cells!r}")
    tenants = tuple(_tenant_policy(cell, f"tenants[{i}]") for i, cell in enumerate(cells))
    seen: dict[tuple[str, PriorityClass], int] = {}
    for i, cell in enumerate(tenants):
        first = seen.setdefault((cell.tenant_id, cell.priority_class), i)
        if first != i:
            raise PolicyError(f"tenants[{i}]: a row of {cell.tenant_id} {cell.priority_class.label} is already given")
    return PolicySnapshot(version=version, classes=classes, tenants=tenants)


_MAX_MS = 7 * 24 * 3_600_000
_MAX_COUNT = 10**15

# field -> (least, most, may be null)
_CLASS_RANGES: Mapping[str, tuple[int, int, bool]] = {
    "ttft_target_ms": (1, _MAX_MS, True),
    "tbt_target_ms": (1, _MAX_MS, True),
    "hard_deadline_ms": (1, _MAX_MS, True),
    "max_queue_wait_ms": (0, _MAX_MS, True),
    "floor_percent": (0, 100, False),
    "cap_slots_percent": (1, 100, False),
    "cap_memory_percent": (1, 100, False),
    "patience_steps": (0, 1_000_000, True),
    "patience_ms": (0, _MAX_MS, True),
    "fairness_gap_ms": (1, _MAX_MS, False),
    "quantum_steps": (1, 1_000_000, False),
    "step_cap_percent": (1, 100, False),
    "token_budget_max": (1, 1_000_000, False),
    "chunk_max": (1, 1_000_000, False),
    "chunk_min": (1, 1_000_000, False),
    "bypass_limit": (0, 1_000_000, False),
    "max_preemptions": (0, 1_000_000, False),
    "governor_on_percent": (0, 100, False),
    "governor_off_percent": (0, 100, False),
}
_TENANT_RANGES: Mapping[str, tuple[int, int, bool]] = {
    "weight": (1, 1_000_000, False),
    "value_micros": (0, _MAX_COUNT, False),
    "requests_per_minute": (0, _MAX_COUNT, True),
    "tokens_per_minute": (0, _MAX_COUNT, True),
    "concurrency": (0, _MAX_COUNT, True),
    "money_micros": (0, _MAX_COUNT, True),
    "default_max_tokens": (1, _MAX_COUNT, False),
    "max_tokens_cap": (0, _MAX_COUNT, True),
    "hard_deadline_ms": (1, _MAX_MS, True),
}


def bounds_of(policy: type[ClassPolicy] | type[TenantClassPolicy]) -> Mapping[str, tuple[int, int, bool]]:
    """What ``snapshot_from_dict`` takes, for each number of a row: field -> (least, most, may be null)."""
    return _CLASS_RANGES if policy is ClassPolicy else _TENANT_RANGES


def _class_policy(data: object, priority_class: PriorityClass) -> ClassPolicy:
    where = f"classes.{priority_class.label}"
    row = _mapping(data, where)
    _known(row, set(_CLASS_RANGES), where)
    missing = [name for name in _CLASS_RANGES if name not in row]
    if missing:
        raise PolicyError(f"{where}: {missing[0]} is missing")
    policy = ClassPolicy(priority_class=priority_class, **_numbers(row, _CLASS_RANGES, where))
    if policy.patience_steps is not None and policy.patience_ms is not None:
        raise PolicyError(f"{where}: give patience_steps or patience_ms, not both")
    if not policy.chunk_min <= policy.chunk_max <= policy.token_budget_max:
        raise PolicyError(f"{where}: chunk_min <= chunk_max <= token_budget_max must hold")
    if policy.governor_off_percent > policy.governor_on_percent:
        raise PolicyError(f"{where}: governor_off_percent must be at most governor_on_percent")
    return policy


def _tenant_policy(data: object, where: str) -> TenantClassPolicy:
    row = _mapping(data, where)
    others: Mapping[str, Callable[[object, str], object]] = {
        "tenant_id": _text,
        "priority_class": _label,
        "allowed": _boolean,
        "money_window": _window,
        "overflow_to": _label_or_none,
    }
    _known(row, set(_TENANT_RANGES) | set(others), where)
    required = [field.name for field in fields(TenantClassPolicy) if field.default is MISSING]
    for name in required:
        if name not in row:
            raise PolicyError(f"{where}: {name} is missing")
    values: dict[str, Any] = {
        name: check(row[name], f"{where}.{name}") for name, check in others.items() if name in row
    }
    policy = TenantClassPolicy(**values, **_numbers(row, _TENANT_RANGES, where))
    if policy.overflow_to is not None and policy.overflow_to <= policy.priority_class:
        raise PolicyError(f"{where}.overflow_to must be a lower class than {policy.priority_class.label}, or null")
    return policy


def _numbers(row: Mapping[str, object], ranges: Mapping[str, tuple[int, int, bool]], where: str) -> dict[str, Any]:
    numbers: dict[str, int | None] = {}
    for name, (least, most, may_be_null) in ranges.items():
        if name not in row:
            continue
        value = row[name]
        is_null = value is None and may_be_null
        numbers[name] = None if is_null else _integer(value, f"{where}.{name}", least, most, may_be_null=may_be_null)
    return numbers


def _integer(value: object, where: str, least: int, most: int | None, *, may_be_null: bool = False) -> int:
    if type(value) is int and value >= least and (most is None or value <= most):
        return value
    span = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise PolicyError(f"{where} must be {span}{' or null' if may_be_null else ''}, not {value!r}")


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return value
    raise PolicyError(f"{where} must be an object, not {value!r}")


def _known(row: Mapping[str, object], names: set[str], where: str) -> None:
    unknown = [name for name in row if name not in names]
    if unknown:
        raise PolicyError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(names))}")


def _text(value: object, where: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise PolicyError(f"{where} must be a text that is not empty, not {value!r}")


def _label(value: object, where: str) -> PriorityClass:
    for priority_class in PriorityClass:
        if value == priority_class.label:
            return priority_class
    raise PolicyError(f"{where} must be interactive, default or batch, not {value!r}")


def _label_or_none(value: object, where: str) -> PriorityClass | None:
    return None if value is None else _label(value, where)


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise PolicyError(f"{where} must be true or false, not {value!r}")


def _window(value: object, where: str) -> str:
    if value in ("day", "month"):
        return str(value)
    raise PolicyError(f"{where} must be day or month, not {value!r}")
