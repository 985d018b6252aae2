"""What differs between two policies, and carrying an edit over to a policy that has moved on. Pure: plain documents.

A document is ``scheduler_engine.policy.snapshot_to_dict``, and beside it the places that are ``paused``: granted, and
letting nobody in for the moment, which no edit ends but one that takes the class away. A place is "class <label>" or
"<tenant id> <label>"; of prices, which stand beside it, "price <model> <label>".
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
_CLASS = "class "
_PAUSED = "paused"


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One field at one place. ``before`` is None too where the place is new, ``after`` where it is gone."""

    place: str
    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Conflict:
    """The same field edited twice from the same start: theirs is in force, ours was to be."""

    place: str
    field: str
    theirs: Any
    ours: Any


def granted(document: Document) -> Document:
    """What the engine is to be asked of an edit: as if nothing were paused."""
    return {name: value for name, value in document.items() if name != _PAUSED}


def followed(document: Document) -> Document:
    """What gateways and workers go by: nothing that is paused lets anybody in."""
    paused = document.get(_PAUSED, ())
    cells = [{**row, "allowed": row["allowed"] and _tenant_place(row) not in paused} for row in document["tenants"]]
    return {**granted(document), "tenants": cells}


def diff(before: Document, after: Document) -> list[Change]:
    """Every field that differs, in the order of places and fields. The version numbers themselves are no change."""
    old, new = places(before), places(after)
    changes = []
    for place in sorted(old.keys() | new.keys()):
        left, right = old.get(place, {}), new.get(place, {})
        if left == right:
            continue
        for field in sorted(left.keys() | right.keys()):
            if left.get(field) != right.get(field):
                changes.append(Change(place, field, left.get(field), right.get(field)))
    return changes


def conflicts(edit: Sequence[Change], since: Iterable[Change]) -> list[Conflict]:
    """Fields that both an edit and what happened since its start have changed, to different values."""
    moved = {(change.place, change.field): change.after for change in since}
    return [
        Conflict(change.place, change.field, moved[change.place, change.field], change.after)
        for change in edit
        if (change.place, change.field) in moved and moved[change.place, change.field] != change.after
    ]


def carried_over(edit: Iterable[Change], current: Document) -> Document:
    """The current policy with an edit made to it. An edit at a place that is gone (a tenant of before) is dropped."""
    document = copy.deepcopy(current)
    rows = {_tenant_place(row): row for row in document["tenants"]}
    for change in edit:
        if change.place.startswith(_CLASS):
            document["classes"][change.place.removeprefix(_CLASS)][change.field] = change.after
        elif change.place in rows:
            rows[change.place][change.field] = change.after
    return document


def places(document: Document) -> dict[str, dict[str, Any]]:
    """The fields of every place of a policy, and whether it is paused."""
    paused = document.get(_PAUSED, ())
    classes = {f"{_CLASS}{label}": dict(row) for label, row in document["classes"].items()}
    own = ("tenant_id", "priority_class")
    cells = {
        _tenant_place(row): {
            **{name: value for name, value in row.items() if name not in own},
            _PAUSED: _tenant_place(row) in paused,
        }
        for row in document["tenants"]
    }
    return {**classes, **cells}


def in_words(place: str, names: Mapping[str, str]) -> str:
    """A place with its tenant's name, by tenant id."""
    head, _, label = place.partition(" ")
    return place if head in ("class", "price") else f"{names.get(head, head)}, {label}"


def _tenant_place(row: dict[str, Any]) -> str:
    return f"{row['tenant_id']} {row['priority_class']}"
