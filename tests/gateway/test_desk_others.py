"""Edits of the same field that are not in force: each one's page names the others before they meet at a conflict."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from billing import services as billing_services
from billing.pricing import TokenPrices
from tenants.models import PolicyProposal
from tests.gateway.desk_world import act, drafted, open_house


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def others(client: Client, proposal: PolicyProposal) -> list[tuple[str, ...]]:
    """(place, field, value, by whom, state) as the page of an edit has them."""
    page = client.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    (table,) = re.findall(r'aria-label="Other edits of the same">.*?<tbody>(.*?)</tbody>', page) or [""]
    cells = r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>'
    return re.findall(cells + r'<td><a href="[^"]*">(\w+), .*?<span class="role">(\w+)', table)


def test_an_edit_names_every_other_that_is_not_in_force_and_changes_the_same(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    one, two = drafted(house.alice, default__weight="7"), drafted(house.bob, default__weight="9")
    drafted(house.bob, default__concurrency="9")
    act(house.bob, two, action="send")
    assert others(house.alice, one) == [("Aurora, default", "weight", "9", "bob", "waiting")]
    assert others(house.bob, two) == [("Aurora, default", "weight", "7", "alice", "draft")]


def test_ten_drafts_of_one_field_warn_of_each_other(house: Any) -> None:
    drafts = [drafted(house.alice, default__weight=str(7 + number)) for number in range(10)]
    found = others(house.alice, drafts[4])
    assert [value for _, _, value, _, _ in found] == ["16", "15", "14", "13", "12", "10", "9", "8", "7"]


def test_an_edit_that_is_alone_with_its_fields_names_nobody(house: Any) -> None:
    own = drafted(house.alice, default__weight="7")
    drafted(house.bob, default__concurrency="9")
    gone = drafted(house.bob, default__weight="9")
    act(house.bob, gone, action="withdraw")
    assert others(house.alice, own) == []


def test_edits_made_of_different_versions_are_compared_by_what_each_changes(house: Any) -> None:
    early = drafted(house.alice, default__weight="7")
    act(house.bob, drafted(house.bob, default__concurrency="9"), action="send")
    late = drafted(house.bob, default__weight="8")
    assert others(house.alice, early) == [("Aurora, default", "weight", "8", "bob", "draft")]
    assert others(house.bob, late) == [("Aurora, default", "weight", "7", "alice", "draft")]


def test_an_edit_that_came_too_late_names_those_that_wait_for_the_same(house: Any) -> None:
    first, second, _ = (
        drafted(client, default__weight=weight)
        for client, weight in ((house.alice, "7"), (house.bob, "8"), (house.alice, "9"))
    )
    act(house.alice, first, action="send")
    act(house.bob, second, action="send")
    assert PolicyProposal.objects.get(id=second.id).state == "conflict"
    assert others(house.bob, second) == [("Aurora, default", "weight", "9", "alice", "draft")]
    assert others(house.alice, first) == []


def test_drafts_of_one_price_warn_of_each_other(house: Any) -> None:
    User.objects.get(username="alice").user_permissions.add(Permission.objects.get(codename="change_price"))
    billing_services.set_prices(actor="tests", prices={("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)})
    for value in ("4000", "5000"):
        page = house.alice.get("/operator/policy/prices").content.decode()
        boxes = dict(re.findall(r'name="(price[^"]+)" value="([^"]*)"', page))
        house.alice.post("/operator/policy/prices", boxes | {"price.m.batch.output": value})
    newest = PolicyProposal.objects.latest("created_at")
    assert others(house.alice, newest) == [("price m batch", "output", "4,000", "alice", "draft")]
