"""What several people make at once is made once, and whoever came later reads why: no page and no call breaks."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from billing import services as billing_services
from billing.models import LedgerEntry
from gateway.console.pages import entrance
from gateway.webhooks.models import Threshold
from tenants import admin as tenants_admin
from tenants import members, proposals, selectors, services
from tenants.models import Invitation, Membership, PolicyVersion, Project, Tenant
from tenants.policy_changes import Document
from tenants.roles import Role
from tests.gateway.at_once import at_once, meet_behind, overlap_behind, sender
from tests.gateway.management_world import ROOT, House, of_owner_and_operator, open_houses

PASSWORD = "long enough, and not common"
NAMES = ("zoe", "Zoe", "ZOE")  # one name, to who reads the trail


@dataclass(frozen=True)
class Raced:
    """``send``: what the first, second and third do. ``check``: what each has passed before one of them writes, and how
    often each passes it. ``alone``: what one passes while it keeps the others back, or each at once where it does not.
    ``words``: what one who came later reads, where that is sure.
    """

    send: Callable[[int], Any]
    made: Callable[[], int]
    check: tuple[Any, str, int] | None = None
    words: str = ""
    alone: tuple[Any, str] | None = None


def page(browser: Client, address: str, **form: Any) -> Callable[[int], Any]:
    return lambda _: sender(browser).post(address, {"made_id": uuid.uuid4(), **form})


def route(house: House, address: str, body: dict[str, str]) -> Callable[[int], Any]:
    """``address``: with the number of the sender, where it names one."""
    headers = {"Authorization": f"Bearer {house.management_key(Role.OWNER)}"}

    def send(number: int) -> Any:
        client = Client(raise_request_exception=False)
        return client.post(f"{ROOT}/{address.format(number)}", body, "application/json", headers=headers)

    return send


def adjustment(house: House, browser: Client) -> Raced:
    operation_id = LedgerEntry.objects.get(kind="settle", tenant_id=house.tenant.pk).operation_id
    add = "/admin/billing/ledgerentry/add/"
    send = page(browser, add, operation_id=operation_id, amount_micros="-7", reason="all of it")
    made, check = LedgerEntry.objects.filter(kind="adjust").count, (billing_services, "refuse_adjustment", 1)
    return Raced(send, made, check, "The operation is charged 0 micro-units")


def adjustment_of_a_credit(house: House, browser: Client) -> Raced:
    """Nothing but the ledger knows of it: there is no request whose row could be held."""
    given = billing_services.credit(actor="tests", tenant_id=house.tenant.pk, amount_micros=7, reason="a gift")
    add = "/admin/billing/ledgerentry/add/"
    send = page(browser, add, operation_id=given.operation_id, amount_micros="7", reason="taken back")
    made = LedgerEntry.objects.filter(kind="adjust", amount_micros=7).count
    check = (billing_services, "refuse_adjustment", 1)
    return Raced(send, made, check, "a credit of 7 micro-units, of which 7 are taken back already")


def project(house: House, browser: Client) -> Raced:
    send = page(browser, "/console/aurora/projects", name="web", default_class="batch")
    check = (Project, "validate_constraints", 1)
    return Raced(send, Project.objects.filter(name="web").count, check, "already exists")


def project_by_call(house: House, browser: Client) -> Raced:
    send, check = route(house, "projects", {"name": "web"}), (Project, "validate_constraints", 1)
    return Raced(send, Project.objects.filter(name="web").count, check, "already exists")


def project_in_the_admin(house: House, browser: Client) -> Raced:
    add = "/admin/tenants/project/add/"
    send = page(browser, add, tenant=house.tenant.pk, name="web", default_class="batch")
    check = (Project, "validate_constraints", 2)
    return Raced(send, Project.objects.filter(name="web").count, check, "already exists")


def project_renamed(house: House, browser: Client) -> Raced:
    found = [services.create_project(actor="tests", tenant=house.tenant, name=name) for name in ("a", "b", "c")]
    sends = [route(house, f"projects/{one.id}", {"name": "web"}) for one in found]
    check = (Project, "validate_constraints", 1)
    made = Project.objects.filter(name="web").count
    return Raced(lambda number: sends[number](number), made, check, "already exists")


def tenant(house: House, browser: Client) -> Raced:
    send = page(browser, "/admin/tenants/tenant/add/", slug="nova", name="Nova", timezone="UTC")
    check = (Tenant, "validate_constraints", 2)
    return Raced(send, Tenant.objects.filter(slug="nova").count, check, "Tenant with this Slug already exists.")


def user(house: House, browser: Client) -> Raced:
    form = {"usable_password": "true", "password1": PASSWORD, "password2": PASSWORD}

    def send(number: int) -> Any:
        return page(browser, "/admin/auth/user/add/", username=NAMES[number], **form)(number)

    made = User.objects.filter(username__iexact="zoe").count
    return Raced(send, made, words="already exists", alone=(tenants_admin, "free_name"))


def user_renamed(house: House, browser: Client) -> Raced:
    found = [User.objects.create_user(name) for name in ("a", "b", "c")]
    form = {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}

    def send(number: int) -> Any:
        address = f"/admin/auth/user/{found[number].pk}/change/"
        return page(browser, address, username=NAMES[number], **form)(number)

    made = User.objects.filter(username__iexact="zoe").count
    return Raced(send, made, words="already exists", alone=(tenants_admin, "free_name"))


def group(house: House, browser: Client) -> Raced:
    send, check = page(browser, "/admin/auth/group/add/", name="desk"), (Group, "validate_constraints", 1)
    return Raced(send, Group.objects.filter(name="desk").count, check, "already exists")


def invitation(house: House, browser: Client) -> Raced:
    send = page(browser, "/console/aurora/members", email="zoe@aurora.example", role="auditor")
    made = Invitation.objects.filter(email="zoe@aurora.example", ended_at=None).count
    return Raced(send, made, (Invitation, "full_clean", 1))


def invitation_by_call(house: House, browser: Client) -> Raced:
    send = route(house, "invites", {"email": "zoe@aurora.example", "role": "auditor"})
    made = Invitation.objects.filter(email="zoe@aurora.example", ended_at=None).count
    return Raced(send, made, (Invitation, "full_clean", 1))


def links(house: House) -> list[str]:
    emails = [f"zoe{number}@aurora.example" for number in range(3)]
    made = [members.invite(actor="tests", tenant=house.tenant, email=one, role=Role.AUDITOR) for one in emails]
    return [f"/invitation/{one.token}" for one in made]


def member(house: House, browser: Client) -> Raced:
    zoe, client, found = User.objects.create_user("zoe", password="x"), Client(), links(house)
    client.force_login(zoe, backend="django.contrib.auth.backends.ModelBackend")
    made = Membership.objects.filter(user=zoe).count
    return Raced(lambda number: sender(client).post(found[number]), made, (Membership, "full_clean", 1))


def account(house: House, browser: Client) -> Raced:
    found = links(house)

    def send(number: int) -> Any:
        return sender(Client()).post(found[number], {"username": NAMES[number], "password": PASSWORD})

    made, check = User.objects.filter(username__iexact="zoe").count, (entrance, "validate_password", 1)
    return Raced(send, made, check, "this name is taken", alone=(entrance, "free_name"))


def who_joins_by_one_link(house: House, browser: Client) -> Raced:
    """Three who have no account yet: the others are told that it has ended."""
    (link, *_), check = links(house), (entrance, "validate_password", 1)
    made = User.objects.filter(email__startswith="zoe").count

    def send(number: int) -> Any:
        return sender(Client()).post(link, {"username": f"zoe{number}", "password": PASSWORD})

    return Raced(send, made, check, "This invitation has ended")


def line_for_alerts(house: House, browser: Client) -> Raced:
    send = page(browser, "/console/aurora/alerts", priority_class="batch", measure="tokens", amount="9")
    return Raced(send, Threshold.objects.count, words="this one is there already")  # they are counted one by one


def draft() -> str:
    """The page of a new one; each says the same."""
    found = selectors.current_policy()
    assert found is not None
    edited: Document = {**found.policy, "classes": {**found.policy["classes"]}}
    edited["classes"]["batch"] = {**edited["classes"]["batch"], "floor_percent": 7}
    made = proposals.draft(actor="aurora-ann", document=edited, based_on=found.version)
    return f"/operator/policy/edits/{made.id}"


def version(house: House, browser: Client) -> Raced:
    send = page(browser, draft(), action="send", reason="they pay more")
    return Raced(send, PolicyVersion.objects.filter(reason="they pay more").count)


def version_of_three_edits_that_say_the_same(house: House, browser: Client) -> Raced:
    drafts = [draft() for _ in range(3)]
    made = PolicyVersion.objects.filter(reason="they pay more").count
    form = {"action": "send", "reason": "they pay more"}
    return Raced(lambda number: sender(browser).post(drafts[number], form), made)


EVERY = [
    *(
        adjustment,
        adjustment_of_a_credit,
        project,
        project_by_call,
        project_in_the_admin,
        project_renamed,
        tenant,
        user,
        user_renamed,
        group,
    ),
    *(invitation, invitation_by_call, member, account, who_joins_by_one_link, line_for_alerts),
    *(version, version_of_three_edits_that_say_the_same),
]


@pytest.mark.parametrize("raced", EVERY)
def test_what_three_make_at_once_is_made_once_and_the_others_read_why(
    transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch, raced: Callable[[House, Client], Raced]
) -> None:
    house = open_houses(settings)["aurora"]
    race = raced(house, of_owner_and_operator(house))
    if race.check:
        owner, name, times = race.check
        meet_behind(monkeypatch, owner, name, times)
    if race.alone:
        overlap_behind(monkeypatch, *race.alone)
    answers = at_once(race.send)
    told = [answer.content.decode() for answer in answers]
    assert race.made() == 1
    assert max(answer.status_code for answer in answers) < 500
    assert not any("Constraint “" in text for text in told)
    assert not race.words or sum(race.words in text for text in told) == 2
