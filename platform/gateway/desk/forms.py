"""The quota matrix and the class parameters as forms over a policy document. Bounds are the engine's; saves nothing."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from scheduler_engine.policy import ClassPolicy, PriorityClass, TenantClassPolicy, bounds_of
from tenants.forms import whole_number
from tenants.policy_changes import Document

COLUMNS: dict[str, tuple[str, str]] = {  # field: (what it is called, its unit)
    "allowed": ("may", ""),
    "weight": ("weight", "a share"),
    "value_micros": ("value", "micros/token"),
    "requests_per_minute": ("requests", "a minute"),
    "tokens_per_minute": ("tokens", "a minute"),
    "concurrency": ("calls", "at once"),
    "money_micros": ("money", "micros"),
    "money_window": ("in a", ""),
    "default_max_tokens": ("answer", "tokens, default"),
    "max_tokens_cap": ("answer", "tokens, at most"),
    "hard_deadline_ms": ("deadline", "ms"),
    "overflow_to": ("beyond its limits", "served in class"),
}
RANKS = {name.label: rank for rank, name in enumerate(PriorityClass)}
CELL_FIELDS = tuple(one.name for one in fields(TenantClassPolicy) if one.name not in ("tenant_id", "priority_class"))
CLASS_FIELDS = tuple(one.name for one in fields(ClassPolicy) if one.name != "priority_class")
WINDOWS = ("day", "month")


@dataclass(slots=True)
class Box:
    """One input: what it is called in the form, what stands in it, and what is wrong with that."""

    name: str
    label: str
    value: Any
    wrong: str = ""

    @property
    def kind(self) -> str:
        if self.name.endswith(".allowed"):
            return "tick"
        if self.name.endswith(".overflow_to"):
            return "class"
        return "window" if self.name.endswith(".money_window") else "number"

    @property
    def lower_classes(self) -> list[str]:
        """Of a cell's box: where its overflow may go."""
        return list(RANKS)[RANKS[self.name.split(".")[-2]] + 1 :]


@dataclass(slots=True)
class Cell:
    """One tenant and class. ``share_percent``: of the class's device time, while all who may are busy; None where
    nobody is let in. ``is_off``: the tenant as a whole.
    """

    tenant_id: str
    tenant: str
    priority_class: str
    boxes: list[Box]
    share_percent: float | None
    is_paused: bool
    is_off: bool


@dataclass(slots=True)
class Edited:
    """A document with the form's values in it, and every box that cannot stand."""

    document: Document
    wrong: dict[str, str] = field(default_factory=dict)


def cells(
    document: Document,
    names: Mapping[str, str],
    shown: Iterable[str],
    paused: Container[tuple[str, str]] = (),
    off: Container[str] = (),
) -> list[Cell]:
    """The matrix of these tenants, in the order of their names and of the classes. ``paused``: (tenant id, class) of
    all that is paused; ``off``: ids of all tenants that are switched off.
    """
    wanted = set(shown)

    def is_in(row: Mapping[str, Any]) -> bool:
        is_paused = (row["tenant_id"], row["priority_class"]) in paused
        return row["allowed"] and not is_paused and row["tenant_id"] not in off

    totals: dict[str, int] = {}
    for row in filter(is_in, document["tenants"]):
        totals[row["priority_class"]] = totals.get(row["priority_class"], 0) + row["weight"]
    found = [
        Cell(
            row["tenant_id"],
            names.get(row["tenant_id"], row["tenant_id"]),
            row["priority_class"],
            [Box(box_name(row, name), name, row.get(name)) for name in CELL_FIELDS],
            100 * row["weight"] / totals[row["priority_class"]] if is_in(row) else None,
            (row["tenant_id"], row["priority_class"]) in paused,
            row["tenant_id"] in off,
        )
        for row in document["tenants"]
        if row["tenant_id"] in wanted
    ]
    return sorted(found, key=lambda cell: (cell.tenant, cell.tenant_id, RANKS[cell.priority_class]))


def class_rows(document: Document) -> list[tuple[str, list[Box]]]:
    """A row a parameter, a box a class."""
    return [
        (name, [Box(f"class.{label}.{name}", label, document["classes"][label][name]) for label in RANKS])
        for name in CLASS_FIELDS
    ]


def box_name(row: Mapping[str, Any], name: str) -> str:
    return f"{row['tenant_id']}.{row['priority_class']}.{name}"


def edited(document: Document, posted: Mapping[str, str]) -> Edited:
    """The document with what was posted. A cell takes part where its ``.weight`` came; an unticked box is not sent."""
    made = Edited(copy.deepcopy(document))
    for row in made.document["tenants"]:
        if box_name(row, "weight") in posted:
            for name in CELL_FIELDS:
                _read_into(made, row, name, box_name(row, name), posted, TenantClassPolicy)
    for label, row in made.document["classes"].items():
        for name in CLASS_FIELDS:
            if f"class.{label}.{name}" in posted:
                _read_into(made, row, name, f"class.{label}.{name}", posted, ClassPolicy)
    return made


def _read_into(
    made: Edited,
    row: dict[str, Any],
    name: str,
    box: str,
    posted: Mapping[str, str],
    kind: type[TenantClassPolicy] | type[ClassPolicy],
) -> None:
    text = posted.get(box, "").strip()
    if name == "allowed":
        row[name] = text == "on"
    elif name == "money_window":
        if text not in WINDOWS:
            made.wrong[box] = "day or month"
        else:
            row[name] = text
    elif name == "overflow_to":
        if text and (text not in RANKS or RANKS[text] <= RANKS[row["priority_class"]]):
            made.wrong[box] = "a lower class, or empty"
        else:
            row[name] = text or None
    else:
        value, wrong = number(text, *bounds_of(kind)[name])
        if wrong:
            made.wrong[box] = wrong
        else:
            row[name] = value


def number(text: str, least: int, most: int, may_be_empty: bool) -> tuple[int | None, str]:
    """(value, what it should be instead): ASCII digits, which may be grouped."""
    span = f"a whole number from {least:,} to {most:,}{', or empty' if may_be_empty else ''}"
    if not text:
        return (None, "") if may_be_empty else (None, span)
    value = whole_number(text)
    if value is None:
        return None, span
    return (value, "") if least <= value <= most else (None, span)
