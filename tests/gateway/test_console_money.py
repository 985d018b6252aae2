"""Usage and statements in the tenant's console: who sees money, and that pages, files and ledger agree."""

from __future__ import annotations

import csv
import io
import re
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


def test_what_was_not_charged_stands_in_rows_of_its_own_marked_as_such(house: House) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    place = {"tenant_id": house.tenant.id, "priority_class": "batch", "model": "m", "hour": hour}
    for is_charged, prompt, cost in ((True, 1_111, 5), (False, 2_222, 0)):
        counts = {"num_requests": 1, "prompt_tokens": prompt, "cached_tokens": 0, "output_tokens": 1}
        Rollup.objects.create(**place, is_charged=is_charged, cost_micros=cost, **counts)
    for role, cost in ((Role.OWNER, '<td class="number">not charged</td>'), (Role.DEVELOPER, "")):
        page = text_of(house.people[role].get(house.at("usage")))
        rows = [
            row
            for row in re.findall(r"<tr>.*?</tr>", page)
            if re.search('<th scope="row">(batch|all)', row)  # of the table and of its foot
        ]
        assert ["2,222" in row for row in rows] == ["<small>not charged</small>" in row for row in rows]
        assert ["1,111" in row for row in rows] == [True, False, True, False]
        assert [cost in row for row in rows if "2,222" in row] == [True, True]
    file = text_of(house.people[Role.OWNER].get(house.at("usage?format=csv")))
    rows = [(row["is_charged"], row["prompt_tokens"], row["cost_micros"]) for row in csv.DictReader(io.StringIO(file))]
    assert sorted(rows) == [("False", "2222", "0"), ("True", "1111", "5")]


def test_a_statement_s_page_names_the_prices_of_its_lines_and_marks_what_was_not_charged(house: House) -> None:
    names = {"project_id": "p", "project": "main", "key_id": "", "key": "", "priority_class": "default", "model": "m"}
    counts = {"num_requests": 3, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3}
    prices = {"price_version": 17, "price_prompt": 150_000, "price_cached": 75_000, "price_output": 600_000}
    charged = {"is_charged": True, **prices, "rounding_picos": 2_000_000 - 900_000 - 300_000, "cost_micros": 5}
    lost = {"is_charged": False, **dict.fromkeys(prices), "rounding_picos": 0, "cost_micros": 0}
    day = datetime(2026, 1, 1, tzinfo=UTC)
    made = Statement.objects.create(
        tenant=house.tenant,
        day=day.date(),
        zone="UTC",
        starts_at=day,
        ends_at=day + timedelta(days=1),
        lines=[{**names, **counts, **charged}, {**names, **counts, **lost}],
        corrections=[],
        charged_micros=5,
        adjusted_micros=0,
        credited_micros=0,
        total_micros=5,
    )
    page = text_of(house.people[Role.OWNER].get(house.at(f"statements/{made.id}")))
    numbers = [re.findall('<td class="number">(.*?)</td>', row) for row in re.findall(r"<tr>.*?</tr>", page)]
    assert ["3", "10", "4", "3", "17", "0.000000800000", "0.000005"] in numbers
    assert ["3", "10", "4", "3", "", "", "not charged"] in numbers
    assert ["0.150000", "0.075000", "0.600000"] in numbers
    assert "What was used and not charged stands in lines of its own" in page


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
    assert "did not tell apart what was not charged" in page
    assert '<td>late</td><td class="number">-0.000034</td>' in page
    assert "<td>the console</td>" in page
    file = owner.get(house.at(f"statements/{made.id}.csv")).content.decode()
    usage, credit, total = csv.DictReader(io.StringIO(file))
    assert (usage["key"], credit["cost_micros"], total["cost_micros"]) == ("the console", "-34", "-25")
