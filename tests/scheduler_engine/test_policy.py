"""A policy as plain data: it comes back as it went, and what cannot be is refused with the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_engine.policy import (
    ClassPolicy,
    PolicyError,
    PolicySnapshot,
    PriorityClass,
    TenantClassPolicy,
    bounds_of,
    cpu_classes,
    gpu_classes,
    snapshot_from_dict,
    snapshot_to_dict,
)

AURORA = TenantClassPolicy(tenant_id="Aurora", priority_class=PriorityClass.INTERACTIVE, weight=3, money_micros=5)


def document() -> dict[str, Any]:
    snapshot = PolicySnapshot(version=4, classes=gpu_classes(), tenants=(AURORA,))
    return json.loads(json.dumps(snapshot_to_dict(snapshot)))


@pytest.mark.parametrize("classes", [gpu_classes(), cpu_classes()])
def test_a_policy_comes_back_from_json_as_it_went(classes: tuple[Any, Any, Any]) -> None:
    snapshot = PolicySnapshot(version=9, classes=classes, tenants=(AURORA,))
    assert snapshot_from_dict(json.loads(json.dumps(snapshot_to_dict(snapshot)))) == snapshot


def test_tenant_rows_may_leave_fields_at_their_default() -> None:
    data = document() | {"tenants": [{"tenant_id": "Nova", "priority_class": "batch"}]}
    assert snapshot_from_dict(data).tenants == (
        TenantClassPolicy(tenant_id="Nova", priority_class=PriorityClass.BATCH),
    )


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for part in parents:
            data = data[int(part) if part.isdigit() else part]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("tenants.0.weight", -1), r"tenants\[0\].weight must be an integer from 1"),
        (put("tenants.0.weight", 0), r"tenants\[0\].weight"),
        (put("tenants.0.allowed", 1), r"tenants\[0\].allowed must be true or false"),
        (put("tenants.0.priority_class", "urgent"), "interactive, default or batch, not 'urgent'"),
        (put("tenants.0.money_window", "week"), "day or month"),
        (put("tenants.0.overflow_to", "interactive"), r"tenants\[0\].overflow_to must be a lower class than"),
        (put("tenants.0.overflow_to", ""), "interactive, default or batch, not ''"),
        (put("tenants.0.colour", "red"), "unknown field 'colour'"),
        (put("tenants.0.tenant_id", ""), "tenant_id must be a text"),
        (put("classes.batch.floor_percent", 90), "sum to at most 100, not 110"),
        (put("classes.batch.floor_percent", float("nan")), "floor_percent must be an integer"),
        (put("classes.batch.floor_percent", True), "floor_percent must be an integer"),
        (put("classes.batch.cap_slots_percent", 0), "cap_slots_percent must be an integer from 1 to 100"),
        (put("classes.batch.speed", 1), "classes.batch: unknown field 'speed'"),
        (put("classes.urgent", {}), "classes: unknown field 'urgent'"),
        (put("classes.interactive.patience_ms", 5), "patience_steps or patience_ms, not both"),
        (put("classes.default.chunk_min", 4_000), "chunk_min <= chunk_max <= token_budget_max"),
        (put("classes.default.governor_off_percent", 9), "governor_off_percent must be at most"),
        (put("classes.default.ttft_target_ms", "fast"), "integer from 1 to .* or null, not 'fast'"),
        (put("version", -1), "version must be an integer of at least 0"),
        (put("classes", []), "classes must be an object"),
        (put("tenants", {}), "tenants must be a list"),
        (put("extra", 1), "policy: unknown field 'extra'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_the_field(
    edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    data = document()
    edit(data)
    with pytest.raises(PolicyError, match=words):
        snapshot_from_dict(data)


def test_a_class_row_or_a_field_that_is_missing_is_named() -> None:
    data = document()
    del data["classes"]["default"]
    with pytest.raises(PolicyError, match=r"classes\.default must be an object"):
        snapshot_from_dict(data)
    data = document()
    del data["classes"]["default"]["quantum_steps"]
    with pytest.raises(PolicyError, match=r"classes\.default: quantum_steps is missing"):
        snapshot_from_dict(data)


def test_the_same_cell_twice_is_refused() -> None:
    data = document()
    data["tenants"] *= 2
    with pytest.raises(PolicyError, match="Aurora interactive is already given"):
        snapshot_from_dict(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_other_data_is_refused_and_never_crashes(data: object) -> None:
    with pytest.raises(PolicyError):
        snapshot_from_dict(data)


@given(st.sampled_from(sorted(document()["classes"]["batch"])), JSON)
def test_any_value_in_any_field_is_taken_or_refused(name: str, value: object) -> None:
    data = document()
    data["classes"]["batch"][name] = value
    try:
        snapshot = snapshot_from_dict(data)
    except PolicyError:
        return
    assert type(value) in (int, type(None))
    assert getattr(snapshot.classes[2], name) == value


@pytest.mark.parametrize("name", bounds_of(TenantClassPolicy))
def test_the_told_bounds_of_a_cell_are_taken_and_one_more_is_refused(name: str) -> None:
    least, most, _ = bounds_of(TenantClassPolicy)[name]
    for taken in (least, most):
        data = document()
        data["tenants"][0][name] = taken
        assert getattr(snapshot_from_dict(data).tenants[0], name) == taken
    for refused in (least - 1, most + 1):
        data = document()
        data["tenants"][0][name] = refused
        with pytest.raises(PolicyError, match=name):
            snapshot_from_dict(data)


def test_every_number_of_a_class_has_told_bounds() -> None:
    assert set(bounds_of(ClassPolicy)) == set(document()["classes"]["batch"])
