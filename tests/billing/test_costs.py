"""Costs in buckets: with corrections they are what the statements and the ledger say, however they are cut."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from billing import ledger, services, statements
from billing.models import LedgerEntry
from billing.usage import Bucket, Cost, Filter, Group, LineItem, Width, costs
from tenants.models import Tenant
from tests.billing.conftest import PROJECT

USAGE, ADJUSTMENT, CREDIT = LineItem


@pytest.fixture
def day(world: Any) -> dict[str, Any]:
    """Two operations of 27 in two classes, 10 taken back of one; a credit of 9, of which 2 are taken back; and another
    tenant's.
    """
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2, priority_class="batch"), world.release(2)])
    ledger.apply([world.reserve(3), world.usage(3)])
    for tenant_id, slug in ((world.aurora, "aurora"), (world.bulk, "bulk")):
        Tenant.objects.create(id=tenant_id, slug=slug, name=slug)
        credit = services.credit(actor="tests", tenant_id=tenant_id, amount_micros=9, reason="late")
    services.adjust(actor="tests", operation_id=world.operation_id(1), amount_micros=-10, reason="too much")
    credit = LedgerEntry.objects.get(kind="credit", tenant_id=world.aurora)
    services.adjust(actor="tests", operation_id=credit.operation_id, amount_micros=2, reason="less late")
    now = timezone.now()
    return {"tenant_id": world.aurora, "starts_at": now - timedelta(minutes=30), "ends_at": now + timedelta(minutes=2)}


def amounts(found: list[Bucket[Cost]]) -> dict[Any, int]:
    """By line item, and by groups where there are any."""
    sums: Counter[Any] = Counter()
    for bucket in found:
        for cost in bucket.parts:
            sums[(*cost.group.values(), cost.line_item) if cost.group else cost.line_item] += cost.amount_micros
    return dict(sums)


@pytest.mark.parametrize("width", list(Width))
def test_costs_statement_and_ledger_are_one_sum(world: Any, day: dict[str, Any], width: Width) -> None:
    closed = statements.close_due_days(timezone.now() + timedelta(days=3))
    stated = sum(one.total_micros for one in closed if one.tenant_id == world.aurora)
    entries = LedgerEntry.objects.filter(tenant_id=world.aurora).exclude(kind="reserve")
    in_ledger = sum(-one.amount_micros if one.kind == "credit" else one.amount_micros for one in entries)
    assert in_ledger == stated == 27 + 27 - 10 - 9 + 2
    assert amounts(costs(**day, width=width)) == {None: stated}


@pytest.mark.parametrize("width", list(Width))
def test_line_items_tell_charges_and_corrections_apart(day: dict[str, Any], width: Width) -> None:
    found = costs(**day, width=width, by_line_item=True)
    assert amounts(found) == {USAGE: 54, ADJUSTMENT: -10 + 2, CREDIT: -9}


def test_an_adjustment_stands_in_the_groups_of_its_operation_and_a_credit_in_none(day: dict[str, Any]) -> None:
    found = amounts(costs(**day, width=Width.DAY, groups=[Group.PROJECT, Group.CLASS], by_line_item=True))
    place = (PROJECT, "default")
    of_nobody = {(None, "", ADJUSTMENT): 2, (None, "", CREDIT): -9}
    assert found == {(*place, USAGE): 54, (*place, ADJUSTMENT): -10, **of_nobody}
    assert amounts(costs(**day, width=Width.DAY, only=Filter(project_ids=[PROJECT]))) == {None: 44}


def test_a_correction_counts_when_it_was_written_and_not_when_its_operation_ended(world: Any) -> None:
    begins_at = datetime.fromisoformat("2026-11-29T00:00:00+00:00")
    for number, (hour, kind, amount) in enumerate(((1, "settle", 50), (5, "adjust", -20), (26, "credit", 7))):
        LedgerEntry.objects.create(
            operation_id=world.operation_id(number),
            entry_key=kind if kind == "settle" else f"{kind}:{number}",
            kind=kind,
            tenant_id=world.aurora,
            amount_micros=amount,
            actor="tests",
            created_at=begins_at + timedelta(hours=hour),
        )
    asked = {"tenant_id": world.aurora, "starts_at": begins_at, "ends_at": begins_at + timedelta(days=3)}
    found = costs(**asked, width=Width.HOUR)
    dated = {bucket.starts_at.hour + 24 * (bucket.starts_at.day - 29): amounts([bucket]) for bucket in found}
    assert {hour: sums for hour, sums in dated.items() if sums} == {5: {None: -20}, 26: {None: -7}}


def test_ninety_days_of_costs_are_two_queries(world: Any, django_assert_num_queries: Any) -> None:
    now = timezone.now()
    with django_assert_num_queries(2):
        costs(tenant_id=world.aurora, starts_at=now - timedelta(days=90), ends_at=now, width=Width.DAY)
