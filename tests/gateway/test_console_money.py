"""Usage and statements in the tenant's console: who sees money, and that pages, files and ledger agree."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone

from billing.models import Rollup, Statement
from tenants.models import Tenant
from tenants.roles import Role
from tests.gateway.tenant_console import House, open_house, text_of


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    return open_house(settings)


@pytest.mark.parametrize("query", ["span=zz", "by=colour", "format=exe"])
def test_a_view_of_usage_that_there_is_not_is_404(house: House, query: str) -> None:
    assert house.people[Role.OWNER].get(house.at(f"usage?{query}")).status_code == 404


def test_a_statement_shows_that_it_equals_the_ledger_and_says_when_it_does_not(house: House) -> None:
    owner = house.people[Role.BILLING]
    shown = text_of(owner.get(house.at("statements/{statement}")))
    assert "-0.000005" in shown
    assert "-0.000005, equal" in shown
    assert "hello" in shown
    starts_at = timezone.now() + timedelta(days=400)
    span = {"day": starts_at.date(), "starts_at": starts_at, "ends_at": starts_at + timedelta(days=1)}
    sums = {"charged_micros": 7, "adjusted_micros": 0, "credited_micros": 0, "total_micros": 7}
    wrong = Statement.objects.create(tenant=house.tenant, zone="UTC", lines=[], corrections=[], **span, **sums)
    assert "does not equal the ledger" in text_of(owner.get(f"/console/aurora/statements/{wrong.id}"))


def test_money_is_left_out_for_who_may_not_see_it(house: House) -> None:
    table = text_of(house.people[Role.DEVELOPER].get(house.at("usage?format=csv")))
    assert "cost_micros" not in table
    assert "cost_micros" in text_of(house.people[Role.BILLING].get(house.at("usage?format=csv")))


def test_a_quarter_shows_a_day_s_use_as_its_statement_states_it(house: House) -> None:
    Tenant.objects.filter(id=house.tenant.id).update(timezone="Europe/Vienna")
    zone = ZoneInfo("Europe/Vienna")
    today = datetime.combine(timezone.now().astimezone(zone).date(), datetime.min.time(), zone)
    for at, cost in ((today - timedelta(minutes=30), 5), (today + timedelta(minutes=1), 7)):
        Rollup.objects.create(
            tenant_id=house.tenant.id,
            priority_class="default",
            model="m",
            hour=at.astimezone(UTC).replace(minute=0),
            num_requests=6_000,
            prompt_tokens=6_000_000,
            cached_tokens=0,
            output_tokens=4_861,
            cost_micros=cost,
        )
    owner = house.people[Role.OWNER]
    rows = list(csv.DictReader(io.StringIO(owner.get(house.at("usage?span=quarter&format=csv")).content.decode())))
    yesterday = datetime.combine(today.date() - timedelta(days=1), datetime.min.time(), zone)
    assert [(row["starts_at"], row["cost_micros"]) for row in rows] == [
        (yesterday.isoformat(), "5"),
        (today.isoformat(), "7"),
    ]
    page = owner.get(house.at("usage?span=quarter")).content.decode()
    assert "Cost, EUR" in page
    assert ">12,000,000<" in page
    assert ">9,722<" in page


def test_a_credit_has_one_sign_on_the_page_and_in_the_file_and_the_console_s_own_calls_a_name(house: House) -> None:
    amounts = {"num_requests": 1, "prompt_tokens": 2, "cached_tokens": 0, "output_tokens": 3, "cost_micros": 9}
    names = {"project_id": "p", "project": "main", "key_id": "", "key": "", "priority_class": "default", "model": "m"}
    made = Statement.objects.create(
        tenant=house.tenant,
        day="2026-01-01",
        zone="UTC",
        starts_at=datetime(2026, 1, 1, tzinfo=UTC),
        ends_at=datetime(2026, 1, 2, tzinfo=UTC),
        lines=[{**names, **amounts}],
        corrections=[{"kind": "credit", "amount_micros": 34, "reason": "late"}],
        charged_micros=9,
        adjusted_micros=0,
        credited_micros=34,
        total_micros=-25,
    )
    owner = house.people[Role.OWNER]
    page = owner.get(house.at(f"statements/{made.id}")).content.decode()
    assert '<td>late</td><td class="number">-0.000034</td>' in page
    assert "<td>the console</td>" in page
    file = owner.get(house.at(f"statements/{made.id}.csv")).content.decode()
    usage, credit, total = csv.DictReader(io.StringIO(file))
    assert (usage["key"], credit["cost_micros"], total["cost_micros"]) == ("the console", "-34", "-25")
