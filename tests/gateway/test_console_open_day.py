"""The day that is not closed yet: what has come of it, and when its statement comes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest
from django.test import Client

from billing import services as billing_services
from billing import statements
from billing.models import Statement
from gateway.console.pages import money
from tenants import services
from tenants.models import Tenant
from tenants.roles import Role
from tests.gateway.people import person

PAGE = "/console/nova/statements"


@pytest.fixture
def nova(transactional_db: None) -> Tenant:
    """Nothing was used yet."""
    return services.create_tenant(actor="tests", slug="nova", name="Nova", timezone="Pacific/Kiritimati")


@pytest.fixture
def owner(nova: Tenant, settings: Any) -> Client:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a slow hash is not what is tried
    return person(nova, Role.OWNER)


def used(nova: Tenant) -> statements.Day:
    """The open day, with an entry."""
    billing_services.credit(actor="tests", tenant_id=nova.id, amount_micros=7, reason="of this morning")
    day = statements.open_day(nova)
    assert day is not None
    return day


def seen(owner: Client, page: str = PAGE) -> str:
    return str(owner.get(page).content.decode())


def test_a_tenant_without_a_statement_is_told_when_the_first_one_comes(owner: Client, nova: Tenant) -> None:
    assert "Nothing has been used yet" in seen(owner)
    day = used(nova)
    comes_at = f"{day.closes_at.astimezone(UTC):%Y-%m-%d} 10:10 UTC</time>."  # 00:10 of that zone
    shown = [seen(owner, page) for page in (PAGE, f"{PAGE}/open")]
    assert [comes_at in page for page in shown] == [True, True]
    assert "its statement comes at <time" in shown[0]
    assert "its statement, with its files, comes at <time" in shown[1]
    assert statements.close_due_days(day.closes_at - timedelta(seconds=1)) == []
    assert len(statements.close_due_days(day.closes_at)) == 1


def test_a_statement_that_was_due_and_is_not_there_says_so_and_when_it_is_tried_again(
    owner: Client, nova: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_at = used(nova).closes_at
    monkeypatch.setattr(money, "timezone", SimpleNamespace(now=lambda: due_at + timedelta(minutes=1)))
    words = seen(owner)
    assert "was due at <time" in words
    assert "and has not been made: it is tried again at <time" in words
    assert words.index("10:10 UTC") < words.index("has not been made") < words.index("10:25 UTC")


def test_the_open_day_is_shown_as_far_as_it_has_come_and_is_no_statement_yet(owner: Client, nova: Tenant) -> None:
    assert owner.get(f"{PAGE}/open").headers["Location"] == PAGE
    used(nova)
    assert f"{PAGE}/open" in seen(owner)
    shown = seen(owner, f"{PAGE}/open")
    assert ", so far" in shown
    assert "of this morning" in shown
    assert "-0.000007" in shown
    assert ".pdf" not in shown
    assert not Statement.objects.filter(tenant=nova).exists()


@pytest.mark.parametrize(
    ("after", "look"),
    [
        ("08:10:00", "08:10:00"),
        ("08:10:00.000001", "08:25:00"),
        ("08:24:59", "08:25:00"),
        ("08:55:01", "09:10:00"),
        ("23:56:00", "00:10:00"),
    ],
)
def test_the_next_look_for_days_to_close_is_the_first_of_the_clockwork(after: str, look: str) -> None:
    assert f"{money.next_look(datetime.fromisoformat(f'2026-11-30T{after}+00:00')):%H:%M:%S}" == look


def test_a_day_of_every_zone_closes_at_a_look() -> None:
    midnights = [datetime(2026, 11, 30, tzinfo=ZoneInfo(zone)) for zone in sorted(available_timezones())]
    assert [at for at in midnights if money.next_look(at + statements.GRACE) != at + statements.GRACE] == []


@pytest.mark.parametrize(
    ("days_before", "words"), [(1, "has it, from <time"), (3, "has it, and all since the statement")]
)
def test_a_statement_that_begins_before_its_day_says_so(
    owner: Client, nova: Tenant, days_before: int, words: str
) -> None:
    day = used(nova)
    ends_at = day.starts_at - timedelta(days=days_before - 1)
    sums = dict.fromkeys(("charged_micros", "adjusted_micros", "credited_micros", "total_micros"), 0)
    Statement.objects.create(
        tenant=nova,
        day=day.day - timedelta(days=days_before),
        zone=nova.timezone,
        starts_at=ends_at - timedelta(days=1),
        ends_at=ends_at,
        lines=[],
        corrections=[],
        **sums,
    )
    assert words in seen(owner, f"{PAGE}/open")
