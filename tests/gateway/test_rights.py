"""Staff who hold exactly one right: the menus and tables lead to what it opens, and to nothing that it does not."""

from __future__ import annotations

import re
from datetime import date, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from billing import services as billing_services
from billing.models import LedgerAlert, Statement
from billing.pricing import TokenPrices
from tenants import members, proposals, selectors, services
from tenants.models import PolicyProposal
from tenants.roles import Role
from tests.gateway.desk_world import act, open_house, staff

DAY = timedelta(days=1)
POLICY, PRICES = "tenants.change_quotapolicy", "billing.change_price"
OURS = [model._meta for model in admin.site._registry if model._meta.app_label in ("tenants", "billing")]
RIGHTS = sorted(f"{of.app_label}.{deed}_{of.model_name}" for of in OURS for deed in ("view", "change", "add"))
PAGES = {
    *("/", "/console/", "/admin/", "/operator/live", "/operator/policy/history"),
    *("/operator/policy/", "/operator/policy/classes", "/operator/policy/prices"),
    *(f"/admin/{of.app_label}/{of.model_name}/" for of in OURS),
}
NO_PAGE = re.compile(r"/(account|static|metrics|v1|admin/(logout|password_change|jsi18n))|/operator/live/.*csv")


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    """One of each thing that a table leads to."""
    house = open_house(settings, valkey)
    billing_services.set_prices(actor="tests", prices={("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)})
    house.of_policy, house.of_prices = draft_of_policy(), draft_of_prices()
    project = services.create_project(actor="tests", tenant=house.tenant, name="Chat")
    services.issue_key(actor="tests", project=project, name="k", env="test")
    now = timezone.now()
    sums = dict.fromkeys(("charged_micros", "adjusted_micros", "credited_micros", "total_micros"), 0)
    Statement.objects.create(
        tenant=house.tenant,
        day=date(2026, 11, 1),
        zone="UTC",
        starts_at=now - DAY,
        ends_at=now,
        lines=[],
        corrections=[],
        **sums,
    )
    house.alert = LedgerAlert.objects.create(reason="mismatch", subject="w-1")
    return house


def draft_of_policy() -> PolicyProposal:
    current = selectors.current_policy()
    assert current is not None
    document = selectors.live_policy(current.version)
    document["tenants"][0]["weight"] += 1
    return proposals.draft(actor="carol", document=document, based_on=current.version)


def draft_of_prices() -> PolicyProposal:
    current = selectors.current_policy()
    assert current is not None
    edit = billing_services.price_changes(
        {("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)},
        {("m", "batch"): TokenPrices(prompt=1, cached=2, output=4)},
    )
    return proposals.draft(actor="carol", document=current.policy, based_on=current.version, prices=edit)


def carol(*rights: str) -> Client:
    client = staff("carol", may_edit=False)
    for right in rights:
        label, codename = right.split(".")
        found = Permission.objects.get(content_type__app_label=label, codename=codename)
        User.objects.get(username="carol").user_permissions.add(found)
    return client


def led_to(page: str) -> set[str]:
    """Every address of ours that a page links to, but for rows that Django links whoever reads."""
    own = re.sub(r'<div class="readonly">.*?</div>', "", page, flags=re.DOTALL)
    links = re.findall(r'<a\b[^>]*?\bhref="(/[^"#?]*)', own)
    return {link for link in links if not NO_PAGE.match(link)}


@pytest.mark.parametrize("right", [*RIGHTS, "none"])
def test_pages_lead_to_what_a_right_opens_and_to_nothing_else(house: Any, right: str) -> None:
    client = carol(*[right] * (right != "none"))
    statuses = {page: client.get(page, follow=True).status_code for page in PAGES}
    assert set(statuses.values()) <= {200, 403}
    seen: set[str] = set()
    to_see = {"/"}
    while to_see:
        page = to_see.pop()
        seen.add(page)
        answer = client.get(page, follow=True)
        assert answer.status_code == 200, f"{page} is led to, and answers {answer.status_code}"
        if not answer.streaming and answer["Content-Type"].startswith("text/html"):
            to_see |= led_to(answer.content.decode()) - seen
    assert {page for page, status in statuses.items() if status == 200} - seen == set()


@pytest.mark.parametrize(
    "rights", [(), (POLICY,), (PRICES,), ("auth.change_user",)], ids=["none", "quotas", "prices", "people"]
)
def test_an_operator_without_a_tenant_begins_at_the_board(house: Any, rights: tuple[str, ...]) -> None:
    client = carol(*rights)
    form = {"login": "carol", "password": "x"}
    assert client.get("/console/", follow=True).redirect_chain == [("/operator/live", 302)]
    client.logout()
    page = client.post("/account/login/", form, follow=True)
    assert (page.status_code, page.request["PATH_INFO"]) == (200, "/operator/live")


def test_an_operator_who_is_a_member_begins_at_the_tenant(house: Any) -> None:
    client = carol()
    user = User.objects.get(username="carol")
    members.add_member(actor="tests", tenant=house.tenant, user=user, email="carol@example.com", role=Role.AUDITOR)
    assert client.get("/console/")["Location"] == "/console/aurora/"


def test_who_may_change_prices_alone_edits_them_from_the_form_to_the_history(house: Any) -> None:
    client = carol(PRICES)
    page = client.get("/operator/policy/prices").content.decode()
    boxes = dict(re.findall(r'name="(price[^"]+)" value="([^"]*)"', page))
    sent = client.post("/operator/policy/prices", boxes | {"price.m.batch.output": "9"})
    found = PolicyProposal.objects.get(id=sent["Location"].split("/")[-1])
    assert "In force: version" in act(client, found, action="send", reason="dearer power")
    assert "dearer power" in client.get("/operator/policy/history").content.decode()


@pytest.mark.parametrize(
    ("right", "own", "other", "subject"),
    [(PRICES, "of_prices", "of_policy", "quotas"), (POLICY, "of_policy", "of_prices", "prices")],
)
def test_an_edit_is_in_the_hands_of_those_who_may_change_what_it_changes(
    house: Any, right: str, own: str, other: str, subject: str
) -> None:
    client = carol(right)
    mine, theirs = (f"/operator/policy/edits/{getattr(house, name).id}" for name in (own, other))
    assert ">Put it in force</button>" in client.get(mine).content.decode()
    page = client.get(theirs).content.decode()
    assert f"What becomes of it is up to those who may change {subject}." in page
    assert "<button" not in page.partition("<main")[2]
    for action in ("send", "approve", "release", "withdraw"):
        assert client.post(theirs, {"action": action, "reason": "mine"}).status_code == 403
    assert set(PolicyProposal.objects.values_list("state", flat=True)) == {"draft"}


def test_a_second_person_agrees_to_prices_with_the_right_for_prices_alone(house: Any, settings: Any) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    page = act(carol(PRICES), house.of_prices, action="send", reason="dearer power")
    assert "somebody else who may change prices has to open this page and press Approve" in page
    dora = staff("dora", may_edit=False)
    User.objects.get(username="dora").user_permissions.add(Permission.objects.get(codename="change_price"))
    assert "In force: version" in act(dora, house.of_prices, action="approve")


@pytest.mark.parametrize(
    ("right", "address"),
    [
        (PRICES, "/operator/policy/versions/1"),
        (PRICES, "/operator/policy/edits/{policy}/preview"),
        (PRICES, "/operator/policy/pause/{tenant}/default"),
        (PRICES, "/operator/live/drain"),
    ],
)
def test_who_may_change_prices_alone_changes_no_policy(house: Any, right: str, address: str) -> None:
    place = address.format(policy=house.of_policy.id, tenant=house.tenant.id)
    assert carol(right).post(place, {"version": "1"}).status_code == 403


@pytest.mark.parametrize("deed", ["view", "change"])
def test_an_alert_of_the_books_is_closed_by_those_who_may_change_alerts_alone(house: Any, deed: str) -> None:
    form = {"action": "close", "_selected_action": [house.alert.pk]}
    carol(f"billing.{deed}_ledgeralert").post("/admin/billing/ledgeralert/", form)
    house.alert.refresh_from_db()
    assert (house.alert.closed_at is not None) == (deed == "change")
