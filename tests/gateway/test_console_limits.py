"""What pages say of a tenant's limits: budgets with what is used of them, caps and deadlines, to each role what it may
see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings as django_settings

from gateway.console.pages import limits, playground
from scheduler_engine.policy import gpu_classes
from tenants import selectors, services
from tenants.models import QuotaPolicy, Tenant
from tenants.roles import Capability, Role, may
from tests.gateway.tenant_console import House, open_house, text_of
from wire.redis_bus import connect
from wire.redis_keys import Keys

NOON = datetime(2026, 11, 30, 23, 30, tzinfo=UTC)  # the first of December in Vienna
PAGES = ("", "usage")
AMOUNTS = ("0.000060", "0.000041", "0.000007", "0.000012")  # budget, spent, reserved, left
SEERS = [role for role in Role if may(role, Capability.SEE_MONEY)]
OTHERS = [role for role in Role if not may(role, Capability.SEE_MONEY)]


@pytest.fixture
def house(transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(limits, "timezone", SimpleNamespace(now=lambda: NOON))
    made = open_house(settings)
    Tenant.objects.filter(id=made.tenant.id).update(timezone="Europe/Vienna")
    return made


def edit(house: House, label: str = "default", **fields: Any) -> None:
    cell = QuotaPolicy.objects.get(tenant=house.tenant, priority_class=label)
    services.save_quota(actor="tests", policy=replace(selectors.tenant_class_policy(cell), **fields))


@pytest.fixture
def spending(house: House, valkey_url: str, settings: Any) -> Iterator[House]:
    """60 a day in the default class: 41 are spent, 7 reserved."""
    settings.REDIS_URL = valkey_url
    edit(house, money_micros=60, money_window="day")
    name = Keys(django_settings.RUBATO_REDIS_PREFIX).money(str(house.tenant.id), "default", "2026-12-01")
    with connect(valkey_url) as redis:
        redis.hset(name, mapping={"settled": 41, "open": 7})
        yield house
        redis.delete(name)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("role", SEERS)
def test_who_sees_money_sees_what_of_a_budget_is_spent_reserved_and_left(
    spending: House, role: Role, page: str
) -> None:
    shown = text_of(spending.people[role].get(spending.at(page)))
    (row,) = re.findall(r"<tr>(?:(?!</tr>).)*day 2026-12-01.*?</tr>", shown)
    assert re.findall('<td class="number">(.*?)</td>', row) == list(AMOUNTS)
    assert "2026-12-02 00:00 (Europe/Vienna)" in row
    assert "Budgets, EUR" in shown


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("role", OTHERS)
def test_who_sees_no_money_is_told_that_there_is_a_budget_and_no_amount(spending: House, role: Role, page: str) -> None:
    shown = text_of(spending.people[role].get(spending.at(page)))
    assert "default has a budget for each day: the next begins at 2026-12-02 00:00 (Europe/Vienna)." in shown
    assert [amount for amount in AMOUNTS if amount in shown] == []
    assert f"your role, {role}, may not" in shown


def test_a_month_is_one_of_the_tenant_s_calendar(house: House) -> None:
    edit(house, money_micros=60, money_window="month")
    shown = text_of(house.people[Role.OWNER].get(house.at("usage")))
    assert "month 2026-12" in shown
    assert "2027-01-01 00:00 (Europe/Vienna)" in shown


def test_while_the_gate_does_not_answer_the_page_says_so_and_shows_all_else(house: House) -> None:
    edit(house, money_micros=60, money_window="day")
    shown = text_of(house.people[Role.OWNER].get(house.at("usage")))
    assert "cannot be told just now: the gate does not answer" in shown
    assert AMOUNTS[0] in shown


def test_a_budget_that_was_cut_below_what_is_used_has_nothing_left(spending: House) -> None:
    edit(spending, money_micros=10)
    shown = text_of(spending.people[Role.OWNER].get(spending.at("usage")))
    assert '<td class="number">0.000000</td><td>2026-12-02' in shown


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_said_of_budgets_where_there_is_none(house: House, page: str) -> None:
    assert "budget" not in text_of(house.people[Role.OWNER].get(house.at(page))).lower()


@pytest.mark.parametrize("page", PAGES)
def test_caps_of_tokens_and_deadlines_stand_with_the_other_limits(house: House, page: str) -> None:
    edit(house, max_tokens_cap=4_096, default_max_tokens=256, hard_deadline_ms=30_000)
    shown = text_of(house.people[Role.DEVELOPER].get(house.at(page)))
    assert "<td>4,096; 256 if not said</td>" in shown
    assert "<td>30,000 ms</td>" in shown
    services.save_class(actor="tests", policy=replace(gpu_classes()[1], hard_deadline_ms=20_000))
    assert "<td>20,000 ms</td>" in text_of(house.people[Role.DEVELOPER].get(house.at(page)))  # the shorter one


@pytest.mark.parametrize(("role", "left"), [(Role.OWNER, ", with 0.000012 EUR left"), (Role.DEVELOPER, "")])
def test_the_playground_says_that_a_budget_has_to_cover_an_answer(
    spending: House, role: Role, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playground, "_models", lambda me: [playground.Model("m", 2_048, ["default"])])
    shown = text_of(spending.people[role].get(spending.at("playground")))
    assert f"The class default has a budget for each day{left}" in shown
    assert "else the answer is refused, until 2026-12-02 00:00 (Europe/Vienna)" in shown
    assert ("0.0000" in shown) == bool(left)
