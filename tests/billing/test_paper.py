"""What goes to paper: every name readable or known by its id, every number whole, nothing beyond its column."""

from __future__ import annotations

import hashlib
import unicodedata
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from reportlab.pdfbase.ttfonts import TTFont

from billing import documents, paper
from billing.models import Statement

ID = "01a2b3c4-0000-7000-8000-000000000001"
FONT = Path(paper.__file__).parent / "fonts/DejaVuSans.ttf"
REALISTIC = (
    "Customer support assistant (production, EU-West)",
    "nightly summariser of the insurance claims team in Kraków-Łódź",
)
NAMES = {
    "realistic": REALISTIC,
    "longest": ("W" * 120, "M" * 120),
    "of many words": ("w " * 60, "m " * 60),
    "drawn by no font here": ("日" * 120, "🎉" * 120),
    "marked up": ("<b>&amp;</b>" * 10, "</para>" * 10),
    "empty": ("", ""),
}
LARGEST = 10**15
DEAREST = 10**12


def statement(project: str, key: str, **changes: Any) -> Statement:
    line = {
        **{"project_id": ID, "project": project, "key_id": ID, "key": key, "priority_class": "interactive"},
        **{"model": "smollm2-135m-instruct", "num_requests": LARGEST, "prompt_tokens": LARGEST},
        **{"cached_tokens": LARGEST, "output_tokens": LARGEST, "cost_micros": LARGEST, "is_charged": True},
        **{"price_version": 9_999, "price_prompt": DEAREST, "price_cached": DEAREST, "price_output": DEAREST},
        "rounding_picos": LARGEST * 1_000_000 - 1,
    }
    correction = {"kind": "credit", "operation_id": ID, "reason": key, "amount_micros": LARGEST}
    sums = dict.fromkeys(("charged_micros", "adjusted_micros", "credited_micros", "total_micros"), -LARGEST)
    span = {"starts_at": datetime(2026, 11, 29, tzinfo=UTC), "ends_at": datetime(2026, 11, 30, tzinfo=UTC)}
    made = {"day": date(2026, 11, 29), "zone": "UTC", "lines": [line], "corrections": [correction], **span, **sums}
    return Statement(tenant_id=UUID(ID), **{**made, **changes})


@pytest.mark.parametrize(
    "name", ["Łódź \u2013 “quoted” €", "ключ", "Όνομα", "Việt Nam", "A\u030angstro\u0308m", "Ջրհոր", "naïve ½"]
)
def test_a_name_that_the_font_has_is_drawn_as_it_is(name: str) -> None:
    assert paper.drawable(name, ID) == unicodedata.normalize("NFC", name)


@pytest.mark.parametrize(
    "name", ["日本語", "مرحبا", "שלום", "한국어", "ไทย", "हिन्दी", "🎉", "a\x07b", "\u202eabc", "\ufeffx"]
)
def test_a_letter_that_is_not_drawn_stands_as_a_substitute_with_the_id_beside_it(name: str) -> None:
    shown = paper.drawable(f"team {name}", ID)
    has = TTFont("asked", str(FONT)).face.charToGlyph
    assert [letter for letter in shown if ord(letter) not in has] == []
    assert shown.startswith("team ")
    assert shown.endswith(f" ({ID})")


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_nothing_of_a_table_leaves_its_column_and_numbers_are_whole(names: tuple[str, str]) -> None:
    texts = [paper.drawable(name, ID) for name in names]
    number = documents.money(-LARGEST)
    made: Any = paper.table(["Project", "Key", "Output tokens", "Cost (EUR)"], [[*texts, number, number]], texts=(3, 4))
    made.wrap(paper.WIDTH_PT, 10_000)
    assert sum(made._colWidths) == pytest.approx(paper.WIDTH_PT)
    for row in made._cellvalues:
        for column, ((cell,), width_pt) in enumerate(zip(row, made._colWidths, strict=True)):
            cell.wrap(width_pt - 12, 10_000)
            assert max(cell.getActualLineWidths0(), default=0) <= width_pt - 12 + 0.01
            assert column < 2 or row is made._cellvalues[0] or len(cell.blPara.lines) == 1


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_a_statement_of_any_names_is_made_with_every_amount_whole(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reportlab.rl_config.pageCompression", 0)
    page = documents.statement_pdf(statement(*names), tenant_name=names[0]).decode("latin-1")
    assert page.count("(1,000,000,000,000,000)") == 4
    assert page.count("(999999999.999999999999)") == 1
    assert page.count("(1000000.000000)") == 3
    assert page.count("(1000000000.000000)") == 1
    assert page.count("(-1000000000.000000)") == 5


def test_the_columns_of_a_statement_fit_on_the_page_with_the_largest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    table = paper.table
    monkeypatch.setattr(paper, "table", lambda *given, **more: made.append(table(*given, **more)) or made[-1])
    documents.statement_pdf(statement(*REALISTIC), tenant_name="Aurora")
    assert len(made) == 4
    assert all(sum(one._colWidths) <= paper.WIDTH_PT + 0.01 for one in made)


def test_the_font_is_the_one_that_is_named() -> None:
    digest = hashlib.sha256(FONT.read_bytes()).hexdigest()
    assert digest == "3fdf69cabf06049ea70a00b5919340e2ce1e6d02b0cc3c4b44fb6801bd1e0d22"
    assert "Bitstream Vera" in FONT.with_suffix(".LICENSE.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("days", "is_said"), [(1, False), (40, True)])
def test_a_statement_that_begins_before_its_day_says_so(
    days: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reportlab.rl_config.pageCompression", 0)
    ends_at = datetime(2026, 11, 30, tzinfo=UTC)
    made = statement(*REALISTIC, starts_at=ends_at - timedelta(days=days))
    page = documents.statement_pdf(made, tenant_name="Aurora").decode("latin-1")
    assert ("all since the statement before it" in page) == is_said
