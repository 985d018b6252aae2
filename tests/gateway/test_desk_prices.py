"""Prices at the policy desk: seen before they are saved, told afterwards, and edited by two people at once."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from billing import selectors, services
from billing.models import PriceVersion, Rollup, UsageRequest
from billing.price_preview import day_of_use
from billing.pricing import TokenPrices
from gateway.desk.price_table import PriceChange
from tenants.models import PolicyProposal, PolicyVersion
from tests.gateway.desk_world import act, open_house

PAGE = "/operator/policy/prices"
PRICES = {
    ("m", "batch"): TokenPrices(prompt=150_000, cached=75_000, output=450_000),
    ("m", "interactive"): TokenPrices(prompt=400_000, cached=200_000, output=1_200_000),
}


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    found = open_house(settings, valkey)
    for user in User.objects.all():
        user.user_permissions.add(Permission.objects.get(codename="change_price"))
    services.set_prices(actor="tests", prices=PRICES)
    return found


def form_of(client: Client, **changes: str) -> dict[str, str]:
    """What a browser would send; changes by class and kind: ``interactive__output``."""
    text = client.get(PAGE).content.decode()
    found = dict(re.findall(r'name="(price[^"]+)" value="([^"]*)"', text))
    return found | {f"price.m.{name.replace('__', '.')}": value for name, value in changes.items()}


def drafted(client: Client, form: dict[str, str]) -> PolicyProposal:
    answer = client.post(PAGE, form)
    assert answer.status_code == 302, answer.content.decode()
    return PolicyProposal.objects.get(id=answer["Location"].rstrip("/").split("/")[-1])


def price(label: str = "interactive") -> TokenPrices | None:
    return selectors.price_list(selectors.current_price_version()).find("m", label)


def test_a_price_is_seen_old_and_new_beside_what_a_day_would_have_cost_and_then_saved_with_a_reason(house: Any) -> None:
    UsageRequest.objects.bulk_create(
        UsageRequest(
            id=uuid.uuid4(),
            tenant_id=house.tenant.id,
            model="m",
            priority_class="interactive",
            state=state,
            prompt_tokens=10,
            cached_tokens=4,
            output_tokens=3,
            cost_micros=cost,
            reserved_at=timezone.now(),
            ended_at=timezone.now(),
        )
        for state, cost in (("completed", 7), ("cancelled_client", 7), ("failed_platform", 0))
    )
    proposal = drafted(house.alice, form_of(house.alice, interactive__output="12,000,000"))
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert re.search(
        r"1,200,000<br><small>1.200000 EUR</small></td>.*12,000,000<br><small>12.000000 EUR</small>.*&times; 10<", page
    )
    assert "m interactive: output would cost 10 times what it does" in page
    # of each of two charged calls: 6 x 0.4 + 4 x 0.2 + 3 x 1.2 = 6.8 and 39.2 micro-units, rounded up
    assert re.search(r">2</td>.*>0.000014</td>.*>0.000014</td>.*>0.000080</td>", page)
    assert price() == PRICES["m", "interactive"]
    assert "Why: " in act(house.alice, proposal, action="send", reason=" ")
    assert price() == PRICES["m", "interactive"]
    assert "In force: version" in act(house.alice, proposal, action="send", reason="dearer power")
    assert price() == TokenPrices(prompt=400_000, cached=200_000, output=12_000_000)
    saved = PolicyVersion.objects.first()
    told = house.bob.get(f"/operator/policy/versions/{saved.version}").content.decode()
    assert "dearer power" in told
    assert re.search(r"m interactive</th><td>output</td>.*1,200,000<.*12,000,000<", told)


@pytest.mark.parametrize(
    "text", ["٣٤", "-1", "-0", "1e3", "0x10", "1.5", "1,5", "1,2,3", "1_000", "", "1000000000001", "9" * 30]
)
def test_what_is_no_price_is_said_at_its_box_and_nothing_is_drafted(house: Any, text: str) -> None:
    page = house.alice.post(PAGE, form_of(house.alice, interactive__output=text)).content.decode()
    assert "a whole number from 0 to 1,000,000,000,000" in page
    assert not PolicyProposal.objects.exists()


def test_a_form_that_changes_no_price_makes_no_version(house: Any) -> None:
    before = PriceVersion.objects.count(), PolicyVersion.objects.count()
    assert "this edit changes nothing" in house.alice.post(PAGE, form_of(house.alice)).content.decode()
    services.set_prices(actor="tests", prices=PRICES)
    assert (PriceVersion.objects.count(), PolicyVersion.objects.count()) == before


def test_two_who_edit_different_prices_both_get_them(house: Any) -> None:
    forms = form_of(house.alice, interactive__output="1300000"), form_of(house.bob, batch__prompt="160000")
    act(house.alice, drafted(house.alice, forms[0]), action="send", reason="one")
    assert "In force: version" in act(house.bob, drafted(house.bob, forms[1]), action="send", reason="two")
    assert price() == TokenPrices(prompt=400_000, cached=200_000, output=1_300_000)
    assert price("batch") == TokenPrices(prompt=160_000, cached=75_000, output=450_000)


def test_two_who_edit_the_same_price_meet_at_a_conflict_that_shows_both(house: Any) -> None:
    forms = form_of(house.alice, interactive__output="1300000"), form_of(house.bob, interactive__output="1400000")
    act(house.alice, drafted(house.alice, forms[0]), action="send", reason="one")
    page = act(house.bob, drafted(house.bob, forms[1]), action="send", reason="two")
    assert re.search(r"<td>output</td><td>1,300,000</td><td>1,400,000</td>", page)
    assert price() == TokenPrices(prompt=400_000, cached=200_000, output=1_300_000)


def test_two_who_set_a_price_to_the_same_make_one_version_of_it(house: Any) -> None:
    forms = form_of(house.alice, interactive__output="1300000"), form_of(house.bob, interactive__output="1300000")
    drafts = drafted(house.alice, forms[0]), drafted(house.bob, forms[1])
    act(house.alice, drafts[0], action="send", reason="one")
    before = PriceVersion.objects.count(), PolicyVersion.objects.count()
    assert "In force: it stands already in version" in act(house.bob, drafts[1], action="send", reason="two")
    assert (PriceVersion.objects.count(), PolicyVersion.objects.count()) == before


def test_a_version_tells_only_the_prices_that_it_changed(house: Any) -> None:
    both = form_of(house.bob, interactive__output="1300000", batch__prompt="160000")
    forms = form_of(house.alice, interactive__output="1300000"), both
    drafts = drafted(house.alice, forms[0]), drafted(house.bob, forms[1])
    act(house.alice, drafts[0], action="send", reason="one")
    act(house.bob, drafts[1], action="send", reason="two")
    told = [(one["place"], one["before"], one["after"]) for one in PolicyVersion.objects.first().prices]
    assert told == [("price m batch", 150_000, 160_000)]
    assert price() == TokenPrices(prompt=400_000, cached=200_000, output=1_300_000)


@pytest.mark.parametrize("number", ["999", "0", "", "many", "9" * 30])
def test_a_form_of_no_price_version_is_refused_beside_the_one_in_force(house: Any, number: str) -> None:
    form = form_of(house.alice, interactive__output="1300000") | {"price_version": number}
    page = house.alice.post(PAGE, form).content.decode()
    assert "This form is of no price version we know; here is the one in force." in page
    assert f"Price version {selectors.current_price_version()}," in page
    assert 'value="1,200,000"' in page
    assert not PolicyProposal.objects.exists()


def test_a_second_person_agrees_to_prices_where_one_is_asked_for(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    proposal = drafted(house.alice, form_of(house.alice, interactive__output="1300000"))
    act(house.alice, proposal, action="send", reason="dearer power")
    act(house.alice, proposal, action="approve")
    assert price() == PRICES["m", "interactive"]
    act(house.bob, proposal, action="approve")
    assert price() == TokenPrices(prompt=400_000, cached=200_000, output=1_300_000)


def test_prices_may_begin_at_a_moment_to_come(house: Any) -> None:
    proposal = drafted(house.alice, form_of(house.alice, interactive__output="1300000"))
    act(house.alice, proposal, action="send", reason="a new year", effective_from="2999-01-01T00:00")
    assert price() == PRICES["m", "interactive"]
    assert PolicyProposal.objects.get(id=proposal.id).state == "waiting"


@pytest.mark.parametrize("deed", ["look", "send"])
def test_who_may_not_change_prices_neither_drafts_nor_sends_off(house: Any, deed: str) -> None:
    proposal = drafted(house.bob, form_of(house.bob, interactive__output="1300000"))
    bob = User.objects.get(username="bob")
    bob.user_permissions.remove(Permission.objects.get(codename="change_price"))
    if deed == "look":
        assert house.bob.get(PAGE).status_code == 403
    else:
        sent = house.bob.post(f"/operator/policy/edits/{proposal.id}", {"action": "send", "reason": "mine"})
        assert sent.status_code == 403
    assert price() == PRICES["m", "interactive"]


def test_the_day_that_is_told_is_the_last_one_with_use_however_long_ago(house: Any) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0) - timedelta(days=40)
    for ended_at, cost in ((hour + timedelta(minutes=59), 3), (hour - timedelta(hours=24), 1)):
        UsageRequest.objects.create(
            id=uuid.uuid4(),
            tenant_id=house.tenant.id,
            model="m",
            priority_class="batch",
            state="completed",
            output_tokens=5,
            cost_micros=cost,
            reserved_at=ended_at,
            ended_at=ended_at,
        )
        Rollup.objects.create(
            tenant_id=house.tenant.id,
            priority_class="batch",
            model="m",
            hour=ended_at.replace(minute=0),
            num_requests=1,
            prompt_tokens=0,
            cached_tokens=0,
            output_tokens=5,
            cost_micros=cost,
        )
    after = {("m", "batch"): TokenPrices(prompt=0, cached=0, output=1_000_000)}
    day = day_of_use(timezone.now(), PRICES, after)
    assert day.ends_at == hour + timedelta(hours=1)
    assert [(one.num_calls, one.charged_micros, one.now_micros, one.then_micros) for one in day.rows] == [(1, 3, 3, 5)]


def test_where_there_never_was_any_use_no_day_of_it_is_told(house: Any) -> None:
    proposal = drafted(house.alice, form_of(house.alice, interactive__output="12,000,000"))
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "No call has been charged yet" in page
    assert "the last day with use" not in page


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        (333_000, 334_000, "1.003"),
        (334_000, 333_000, "0.997"),
        (10**12 - 1, 10**12, "1.000000000001"),
        (400_000, 410_000, "1.02"),
        (1, 7, "7"),
        (0, 7, ""),
        (7, 0, "0"),
        (1, 1_000, "1,000"),
        (2, 1_999, "1,000"),
        (1, 999, "999"),
        (1_000, 12_345_000, "12,300"),
        (1, 10**12, "1,000,000,000,000"),
        (1_000, 1, "0.001"),
        (10**12, 1, "0.000000000001"),
        (30_000_000, 1, "0.0000000333"),
    ],
)
def test_the_factor_of_a_price_is_written_out_and_never_1_where_it_changes(
    before: int, after: int, factor: str
) -> None:
    assert PriceChange("m batch", "prompt", before, after).factor == factor
