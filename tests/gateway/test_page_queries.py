"""No page asks the database more for more rows, and none more than twelve times (P76)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from benchmarks.page_list import NO_PAGES, addresses, named_patterns
from benchmarks.page_world import examples, furnish
from benchmarks.pages import ELSEWHERE, LIMITS
from billing import services as billing_services
from gateway.console.pages.paging import SHOWN
from tenants import services
from tests.gateway.management_world import PRICES, House

FEW, MORE = 3, 3 * SHOWN


def queries_of(client: Client, paths: dict[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    """How many queries each page asks, and how many rows its longest table has."""
    asked, rows = {}, {}
    for name, path in paths.items():
        with (
            CaptureQueriesContext(connections["default"]) as open_,
            CaptureQueriesContext(connections["tenant"]) as walled,
        ):
            answer = client.get(path)
        if answer.status_code in ELSEWHERE or not answer["Content-Type"].startswith("text/html"):
            continue
        assert answer.status_code == 200, (name, path)
        asked[name] = len(open_) + len(walled)
        rows[name] = max(
            [table.count("<tr") for table in re.findall(r"(?s)<table.*?</table>", answer.content.decode())] or [0]
        )
    return asked, rows


@pytest.fixture
def house(transactional_db: None, valkey: str) -> House:
    made = House("aurora", billing_services.set_prices(actor="tests", prices=PRICES).version)
    services.create_tenant(actor="tests", slug="nova", name="Nova")
    return made


def test_no_page_asks_more_with_more_rows_nor_grows_without_bound(house: House) -> None:
    person = User.objects.create_superuser("alice", "alice@x.example", "x")
    client = Client()
    client.force_login(person)
    furnish(house.tenant, person, FEW)
    paths = addresses(examples(house.tenant))
    client.get(paths["front"])
    few, _ = queries_of(client, paths)
    furnish(house.tenant, None, MORE)
    more, rows = queries_of(client, paths)
    assert {name: number for name, number in more.items() if number > LIMITS["queries"]} == {}
    assert {name: (few[name], number) for name, number in more.items() if number > few[name]} == {}
    assert {name: number for name, number in rows.items() if number > 2 * SHOWN + 1} == {}


@pytest.mark.parametrize("model", ["usagerequest", "rollup"])
def test_no_list_looks_through_all_rows_for_the_names_of_a_filter(house: House, model: str) -> None:
    client: Any = Client()
    client.force_login(User.objects.create_superuser("alice", "alice@x.example", "x"))
    with CaptureQueriesContext(connections["default"]) as asked:
        page = client.get(f"/admin/billing/{model}/?priority_class=batch").content.decode()
    assert [one["sql"] for one in asked if "DISTINCT" in one["sql"]] == []
    assert f"/admin/billing/{model}/" in page
    assert "?priority_class=interactive" in page


def test_every_page_is_found_by_its_address(house: House) -> None:
    furnish(house.tenant, None, 1)
    found = addresses(examples(house.tenant))
    known = {"console-alerts", "console-statement-page", "desk-version", "live", "account_login", "admin:index"}
    assert known <= set(found)
    assert set(NO_PAGES) <= {name for name, _ in named_patterns()}


def test_a_page_whose_parameter_nobody_gives_an_example_of_is_not_passed_over(house: House) -> None:
    given = examples(house.tenant)
    del given["batch_id"]
    with pytest.raises(KeyError, match="batch_id"):
        addresses(given)


def test_a_long_list_is_walked_page_by_page_without_gap_or_repeat(house: House) -> None:
    person = User.objects.create_user("alice", "alice@x.example", "x")
    client: Any = Client()
    client.force_login(person)
    furnish(house.tenant, person, SHOWN + 1)
    seen: list[str] = []
    for number in ("0", "1", "2"):
        page = client.get(f"/console/aurora/keys?page={number}").content.decode()
        seen += re.findall(r'<th scope="row">(.*?)</th>', page)
    assert sorted(seen) == sorted(["app", *(f"key {n}" for n in range(SHOWN + 1))])
    assert client.get("/console/aurora/keys?page=x").status_code == 200
