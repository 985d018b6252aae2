"""What the desk's forms take, and what they say at a box that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.desk import forms
from tests.gateway.desk_world import document


def posted(start: dict[str, Any], **changes: str) -> dict[str, str]:
    """Aurora's default cell as a browser sends it."""
    (row,) = [one for one in start["tenants"] if (one["tenant_id"], one["priority_class"]) == ("aurora", "default")]
    found = {name: "" if row[name] is None else str(row[name]) for name in forms.CELL_FIELDS}
    found["allowed"] = "on"
    found.update(changes)
    return {f"aurora.default.{name}": value for name, value in found.items() if value != "absent"}


def cell_of(made: forms.Edited) -> dict[str, Any]:
    return next(row for row in made.document["tenants"] if row["priority_class"] == "default")


def test_an_untouched_form_changes_nothing() -> None:
    start = document()
    made = forms.edited(start, posted(start))
    assert (made.document, made.wrong) == (start, {})


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("weight", "7", 7),
        ("concurrency", "", None),
        ("concurrency", "0", 0),
        ("tokens_per_minute", "1 000 000", 1_000_000),
    ],
)
def test_a_number_is_read(field: str, text: str, value: int | None) -> None:
    made = forms.edited(document(), posted(document(), **{field: text}))
    assert (cell_of(made)[field], made.wrong) == (value, {})


@pytest.mark.parametrize(
    ("field", "text"),
    [("weight", ""), ("weight", "0"), ("weight", "-1"), ("weight", "NaN"), ("weight", "1e3"), ("weight", "٣"),
     ("concurrency", "-0"), ("concurrency", "-1"), ("hard_deadline_ms", "0"), ("money_window", "year"),
     ("tokens_per_minute", "9" * 30), ("overflow_to", "interactive"), ("overflow_to", "default"),
     ("overflow_to", "nowhere")],
)  # fmt: skip
def test_what_the_engine_would_refuse_is_said_at_its_box(field: str, text: str) -> None:
    made = forms.edited(document(), posted(document(), **{field: text}))
    assert list(made.wrong) == [f"aurora.default.{field}"]
    assert made.document == document()


def test_where_a_class_overflows_to_is_read_and_offered_only_downwards() -> None:
    made = forms.edited(document(), posted(document(), overflow_to="batch"))
    assert (cell_of(made)["overflow_to"], made.wrong) == ("batch", {})
    assert cell_of(forms.edited(made.document, posted(made.document, overflow_to="")))["overflow_to"] is None
    (row, *_) = forms.cells(document(), {}, ["aurora"])
    (box,) = [one for one in row.boxes if one.label == "overflow_to"]
    assert (row.priority_class, box.kind, box.lower_classes) == ("interactive", "class", ["default", "batch"])


def test_an_unticked_box_takes_the_class_away() -> None:
    made = forms.edited(document(), posted(document(), allowed="absent"))
    assert cell_of(made)["allowed"] is False


def test_a_cell_that_was_not_on_the_page_is_left_alone() -> None:
    assert forms.edited(document(), {}).document == document()


def test_class_parameters_are_read_the_same_way() -> None:
    made = forms.edited(document(), {"class.batch.floor_percent": "7", "class.batch.ttft_target_ms": "x"})
    assert made.document["classes"]["batch"]["floor_percent"] == 7
    assert list(made.wrong) == ["class.batch.ttft_target_ms"]


def test_weights_are_shown_as_shares_of_the_class() -> None:
    start = document()
    start["tenants"][-1]["allowed"] = False
    table = forms.cells(start, {"aurora": "Aurora", "nova": "Nova"}, ["aurora", "nova"])
    shares = {(cell.tenant, cell.priority_class): cell.share_percent for cell in table}
    assert (shares["Aurora", "default"], shares["Nova", "default"]) == (75.0, 25.0)
    assert (shares["Aurora", "batch"], shares["Nova", "batch"]) == (100.0, None)


def test_who_is_switched_off_has_no_share_and_takes_none_from_the_others() -> None:
    table = forms.cells(document(), {"aurora": "Aurora", "nova": "Nova"}, ["aurora", "nova"], off={"nova"})
    shares = {(cell.tenant, cell.is_off): cell.share_percent for cell in table}
    assert shares == {("Aurora", False): 100.0, ("Nova", True): None}
