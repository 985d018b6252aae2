"""Statements: every ledger entry in exactly one of them, and their sums those of the ledger."""

from __future__ import annotations

import csv
import io
import re
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, transaction

from billing import documents, ledger, selectors, services, statements
from billing.models import LedgerEntry, Statement
from tenants import services as services_of_tenants
from tenants.models import Project, Tenant

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
LATER = datetime(2026, 12, 31, tzinfo=UTC)


@pytest.fixture
def aurora(world: Any) -> Tenant:
    return Tenant.objects.create(id=world.aurora, slug="aurora", name="Aurora & Sons", timezone="Europe/Vienna")


def entry(tenant: Tenant, number: int, at: datetime, amount: int = 10, kind: str = "settle", **more: Any) -> None:
    """A ledger line at a moment of the test's choosing; the ledger itself stamps lines with the database's clock."""
    LedgerEntry.objects.create(
        operation_id=f"00000000-0000-7000-8000-{number:012d}",
        entry_key=kind if kind == "settle" else f"{kind}:{number}",
        kind=kind,
        tenant_id=tenant.id,
        priority_class="default",
        model="m",
        amount_micros=amount,
        attempt=1 if kind == "settle" else None,
        prompt_tokens=3,
        output_tokens=2,
        actor="tests",
        created_at=at,
        **more,
    )


def days(tenant: Tenant) -> list[tuple[date, int]]:
    return list(Statement.objects.filter(tenant=tenant).order_by("day").values_list("day", "total_micros"))


def test_a_day_ends_at_midnight_of_the_tenants_zone(aurora: Tenant) -> None:
    entry(aurora, 1, datetime(2026, 11, 29, 22, 59, 59, tzinfo=UTC))
    entry(aurora, 2, datetime(2026, 11, 29, 23, 0, 0, tzinfo=UTC))
    statements.close_due_days(LATER)
    assert days(aurora) == [(date(2026, 11, 29), 10), (date(2026, 11, 30), 10)]


def test_a_day_of_the_clock_change_has_all_its_hours(aurora: Tenant) -> None:  # P42
    entry(aurora, 1, datetime(2026, 10, 24, 22, 30, tzinfo=UTC))  # 00:30 in Vienna, summer time
    entry(aurora, 2, datetime(2026, 10, 25, 22, 30, tzinfo=UTC))  # 23:30 in Vienna, winter time: 24 h later, same day
    statements.close_due_days(LATER)
    assert days(aurora) == [(date(2026, 10, 25), 20)]


def test_a_day_closes_only_when_no_transaction_of_it_can_still_commit(aurora: Tenant) -> None:
    entry(aurora, 1, NOON)
    midnight = datetime(2026, 11, 29, 23, tzinfo=UTC)
    assert statements.close_due_days(midnight + statements.GRACE - timedelta(microseconds=1)) == []
    assert len(statements.close_due_days(midnight + statements.GRACE)) == 1


def test_the_open_day_reads_as_its_statement_will_and_is_not_written(aurora: Tenant) -> None:
    entry(aurora, 1, NOON)
    entry(aurora, 2, NOON + timedelta(hours=1))
    day = statements.open_day(aurora)
    assert day is not None
    half, whole = (statements.so_far(aurora, day, NOON + timedelta(hours=hours)) for hours in (1, 30))
    assert (half.total_micros, whole.total_micros) == (10, 20)
    assert days(aurora) == []
    (closed,) = statements.close_due_days(LATER)
    assert (closed.lines, closed.total_micros, closed.ends_at) == (whole.lines, whole.total_micros, whole.ends_at)
    assert statements.open_day(aurora) is None


def test_closing_again_closes_nothing_new(aurora: Tenant) -> None:
    entry(aurora, 1, NOON)
    assert len(statements.close_due_days(LATER)) == 1
    assert statements.close_due_days(LATER) == []


def test_a_tenant_whose_day_cannot_be_closed_keeps_nobody_from_theirs(
    aurora: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    nova = Tenant.objects.create(slug="nova", name="Nova")
    first, last = sorted((aurora, nova), key=lambda tenant: tenant.id)
    entry(first, 1, NOON - timedelta(days=2))
    for number in (2, 3):  # more together than a statement can say
        entry(first, number, NOON, 2**63 - 1)
    entry(last, 4, NOON)
    with pytest.raises(statements.NotAllClosed, match=f"not closed of: {first.slug}$"):
        statements.close_due_days(LATER)
    assert [total for _, total in days(first)] == [10]
    assert days(last) == [(date(2026, 11, 29), 10)]
    assert f"the days of tenant {first.slug} are not closed" in caplog.text


def test_a_day_without_entries_has_no_statement(aurora: Tenant) -> None:
    for number, gap in enumerate((0, 9)):
        entry(aurora, number, NOON + timedelta(days=gap))
    statements.close_due_days(LATER)
    assert [day for day, _ in days(aurora)] == [date(2026, 11, 29), date(2026, 12, 8)]


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kathmandu"])
def test_an_edited_zone_neither_repeats_nor_loses_an_entry(aurora: Tenant, zone: str) -> None:
    for number in range(60):
        entry(aurora, number, NOON + timedelta(hours=number))
    statements.close_due_days(NOON + timedelta(hours=30))
    Tenant.objects.filter(id=aurora.id).update(timezone=zone)
    statements.close_due_days(LATER)
    found = Statement.objects.order_by("starts_at")
    assert sum(one.total_micros for one in found) == 600
    assert all(before.ends_at <= after.starts_at for before, after in pairwise(found))


def test_a_statement_adds_charges_and_adjustments_and_takes_credits_off(aurora: Tenant) -> None:
    entry(aurora, 1, NOON, 100)
    entry(aurora, 2, NOON, -30, "adjust", reason="too much")
    entry(aurora, 3, NOON, 5, "credit", reason="goodwill")
    (statement,) = statements.close_due_days(LATER)
    assert (statement.charged_micros, statement.adjusted_micros, statement.credited_micros) == (100, -30, 5)
    assert statement.total_micros == 65
    assert [one["reason"] for one in statement.corrections] == ["too much", "goodwill"]


def test_the_lines_of_a_statement_are_the_sums_of_each_key(world: Any, aurora: Tenant) -> None:
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), world.usage(2)])
    ledger.apply([world.reserve(3, priority_class="batch"), world.usage(3, priority_class="batch")])
    (statement,) = statements.close_due_days(LATER + timedelta(days=3650))
    lines = {line["priority_class"]: (line["num_requests"], line["cost_micros"]) for line in statement.lines}
    assert lines == {"default": (2, 54), "batch": (1, 14)}
    assert statement.charged_micros == 68
    assert statements.num_wrong([statement]) == 0


def test_a_statement_that_lies_is_found(aurora: Tenant) -> None:
    entry(aurora, 1, NOON)
    (statement,) = statements.close_due_days(LATER)
    statement.charged_micros += 1
    assert statements.num_wrong([statement]) == 1


def test_a_statement_cannot_be_changed_or_deleted(aurora: Tenant) -> None:
    entry(aurora, 1, NOON)
    statements.close_due_days(LATER)
    for change in (lambda: Statement.objects.update(zone="UTC"), lambda: Statement.objects.all().delete()):
        with pytest.raises(DatabaseError, match=r"inserted only|permission denied"), transaction.atomic():
            change()


def test_the_csv_has_every_line_and_ends_with_the_total(aurora: Tenant) -> None:
    entry(aurora, 1, NOON, 100)
    entry(aurora, 2, NOON, 5, "credit", reason="=HYPERLINK(1)")
    (statement,) = statements.close_due_days(LATER)
    rows = list(csv.reader(io.StringIO(documents.statement_csv(statement))))
    amounts = [(row[1], row[rows[0].index("cost_micros")]) for row in rows[1:]]
    assert amounts == [("usage", "100"), ("credit", "-5"), ("total", "95")]
    assert rows[2][-1] == "'=HYPERLINK(1)"


def test_the_pdf_is_the_same_each_time(aurora: Tenant) -> None:
    entry(aurora, 1, NOON, 100)
    (statement,) = statements.close_due_days(LATER)
    first, again = (documents.statement_pdf(statement, tenant_name=aurora.name) for _ in range(2))
    assert first == again
    assert first.startswith(b"%PDF-")


def test_the_pdf_names_the_currency_of_every_amount(
    aurora: Tenant, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.RUBATO_CURRENCY = "chf"
    monkeypatch.setattr("reportlab.rl_config.pageCompression", 0)
    entry(aurora, 1, NOON, 1_500_000)
    entry(aurora, 2, NOON, 5, "credit", reason="sorry")
    (statement,) = statements.close_due_days(LATER)
    page = documents.statement_pdf(statement, tenant_name=aurora.name).decode("latin-1")
    words = " ".join(re.findall(r"\((.*?)\) Tj", page)).replace("\\", "")
    for name in ("Cost", "Adds to the total", "Charged", "Adjusted", "Credited", "Total"):
        assert f"{name} (CHF)" in words
    assert "1.500000" in words
    assert "_" not in words


@pytest.mark.parametrize(("micros", "text"), [(0, "0.000000"), (-1, "-0.000001"), (1_234_567, "1.234567")])
def test_money_is_written_exactly(micros: int, text: str) -> None:
    assert documents.money(micros) == text


def test_keys_of_one_name_are_told_apart(aurora: Tenant) -> None:
    project = Project.objects.create(tenant=aurora, name="web")
    keys = [
        services_of_tenants.issue_key(actor="tests", project=project, name=name, env="test").key
        for name in ("ci", "ci", "laptop")
    ]
    for number, key in enumerate(keys):
        entry(aurora, number, NOON, project_id=project.id, key_id=key.id)
    (found,) = statements.close_due_days(LATER)
    names = [f"ci …{keys[0].last4}", f"ci …{keys[1].last4}", "laptop"]
    assert sorted(line["key"] for line in found.lines) == sorted(names)


def test_a_credit_given_twice_under_one_number_is_one_credit(aurora: Tenant) -> None:
    entries = [
        services.credit(actor="ops", tenant_id=aurora.id, amount_micros=5, reason="sorry", credit_id="7")
        for _ in range(2)
    ]
    assert entries[0] == entries[1]
    with pytest.raises(ValidationError, match="another amount"):
        services.credit(actor="ops", tenant_id=aurora.id, amount_micros=6, reason="sorry", credit_id="7")


@pytest.mark.parametrize(("amount", "reason"), [(0, "x"), (-1, "x"), (5, ""), (10**15 + 1, "x"), (10**22, "x")])
def test_a_credit_needs_an_amount_and_a_reason(aurora: Tenant, amount: int, reason: str) -> None:
    with pytest.raises(ValidationError, match=r"A credit (is above 0|has a reason)"):
        services.credit(actor="ops", tenant_id=aurora.id, amount_micros=amount, reason=reason)
    assert not LedgerEntry.objects.exists()


@pytest.mark.parametrize("before", [0, 20, 50])
def test_no_more_of_a_credit_is_taken_back_than_is_left_of_it(aurora: Tenant, before: int) -> None:
    given = services.credit(actor="admin", tenant_id=aurora.id, amount_micros=50, reason="a gift")
    adjust = partial(services.adjust, actor="admin", operation_id=given.operation_id)
    if before:
        adjust(amount_micros=before, reason="first")
    with pytest.raises(ValidationError, match=f"credit of 50 micro-units, of which {before} are") as refusal:
        adjust(amount_micros=51 - before, reason="slip")
    assert list(refusal.value.message_dict) == ["amount_micros"]
    if before < 50:
        adjust(amount_micros=50 - before, reason="all of it")
    adjust(amount_micros=-50, reason="it was right after all")
    assert selectors.charged_micros(given.operation_id) == 0
