"""The tenant's console: who may open which page, what each form refuses, and what it does."""

from __future__ import annotations

import csv
import io
import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from billing import services as billing_services
from billing import statements
from billing.models import Rollup, Statement
from gateway.webhooks.models import Endpoint
from tenants import api_keys, members, services
from tenants.models import ApiKey, AuditEvent, Invitation, Membership, Project, Tenant
from tenants.roles import Capability, Role, may

PAGES = {
    "": Capability.SEE_USAGE,
    "keys": Capability.SEE_USAGE,
    "keys/{key}/rotate": Capability.MANAGE_KEYS,
    "keys/{key}/revoke": Capability.MANAGE_KEYS,
    "projects": Capability.SEE_USAGE,
    "usage": Capability.SEE_USAGE,
    "usage?span=quarter&by=key": Capability.SEE_USAGE,
    "usage?format=csv": Capability.SEE_USAGE,
    "statements": Capability.SEE_MONEY,
    "statements/{statement}": Capability.SEE_MONEY,
    "statements/{statement}.csv": Capability.SEE_MONEY,
    "statements/{statement}.pdf": Capability.SEE_MONEY,
    "members": Capability.SEE_MEMBERS,
    "alerts": Capability.MANAGE_WEBHOOKS,
    "trail": Capability.SEE_AUDIT,
}
MADE_ID = "00000000-0000-4000-8000-000000000001"
CHANGES = {
    "keys": (Capability.MANAGE_KEYS, {"name": "x", "project": "{project}", "made_id": MADE_ID}),
    "keys/{key}/rotate": (Capability.MANAGE_KEYS, {"grace": "0"}),
    "keys/{key}/revoke": (Capability.MANAGE_KEYS, {}),
    "projects": (Capability.MANAGE_PROJECTS, {"name": "web", "default_class": "batch"}),
    "alerts": (Capability.MANAGE_WEBHOOKS, {"priority_class": "batch", "measure": "tokens", "amount": "9"}),
    "members": (Capability.MANAGE_MEMBERS, {"email": "new@aurora.example", "role": "auditor", "made_id": MADE_ID}),
    "members/{member}/role": (Capability.MANAGE_MEMBERS, {"role": "auditor"}),
    "invitations/{invitation}": (Capability.MANAGE_MEMBERS, {}),
    "members/{member}/remove": (Capability.MANAGE_MEMBERS, {}),
}


class House:
    """Aurora with one of everything, and a person of each role."""

    def __init__(self) -> None:
        self.tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.key = services.issue_key(actor="tests", project=self.project, name="app", env="test").key
        billing_services.credit(actor="tests", tenant_id=self.tenant.id, amount_micros=5, reason="hello")
        (self.statement,) = statements.close_due_days(timezone.now() + timedelta(days=2))
        self.people = {role: self.person(role.value, role) for role in Role}
        self.member = Membership.objects.get(role="developer")
        offer = members.invite(actor="tests", tenant=self.tenant, email="bob@aurora.example", role=Role.AUDITOR)
        self.invitation, self.token = offer.invitation, offer.token

    def person(self, name: str, role: Role | None) -> Client:
        user = User.objects.create_user(name, f"{name}@aurora.example", "a long enough one")
        if role is not None:
            members.add_member(actor="tests", tenant=self.tenant, user=user, email=user.email, role=role)
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        return client

    def at(self, page: str) -> str:
        ids = {
            "project": self.project.id,
            "key": self.key.id,
            "statement": self.statement.id,
            "member": self.member.id,
            "invitation": self.invitation.id,
        }
        return f"/console/aurora/{page.format(**ids)}"


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a slow hash is not what is tried
    return House()


def text_of(answer: Any) -> str:
    return str(answer.content.decode())


def test_a_page_is_open_to_the_roles_that_hold_its_capability(house: House) -> None:
    for page, capability in PAGES.items():
        for role, client in house.people.items():
            answer = client.get(house.at(page))
            assert answer.status_code == (200 if may(role, capability) else 403), (page, role)
            if answer.status_code == 403:
                assert f"As <b>{role.value}</b> of Aurora" in text_of(answer)


@pytest.mark.parametrize("page", CHANGES)
def test_a_form_is_taken_from_the_roles_that_hold_its_capability_alone(house: House, page: str) -> None:
    capability, form = CHANGES[page]
    filled = {name: value.format(project=house.project.id) for name, value in form.items()}
    before = AuditEvent.objects.count()
    for role, client in house.people.items():
        if not may(role, capability):
            assert client.post(house.at(page), filled).status_code == 403
    assert AuditEvent.objects.count() == before
    assert house.people[Role.OWNER].post(house.at(page), filled).status_code in (200, 302)
    assert AuditEvent.objects.count() > before
    assert AuditEvent.objects.first().actor == "owner"


def test_who_is_no_member_sees_a_page_of_a_tenant_that_does_not_exist(house: House) -> None:  # P47
    stranger = house.person("stranger", None)
    for page in (*PAGES, *CHANGES):
        for ask in (stranger.get, stranger.post):
            assert ask(house.at(page)).status_code == 404, page
            assert ask(house.at(page).replace("aurora", "nowhere")).status_code == 404, page


def test_who_is_not_signed_in_is_asked_to(house: House) -> None:
    for page in PAGES:
        answer = Client().get(house.at(page))
        assert (answer.status_code, answer["Location"].partition("?")[0]) == (302, "/account/login/"), page


@pytest.mark.parametrize("query", ["span=zz", "by=colour", "format=exe"])
def test_a_view_of_usage_that_there_is_not_is_404(house: House, query: str) -> None:
    assert house.people[Role.OWNER].get(house.at(f"usage?{query}")).status_code == 404


def test_a_foreign_id_is_an_unknown_one(house: House) -> None:
    other = services.create_tenant(actor="tests", slug="other", name="Other")
    project = services.create_project(actor="tests", tenant=other, name="main")
    foreign = services.issue_key(actor="tests", project=project, name="app", env="test").key
    owner = house.people[Role.OWNER]
    answers = [owner.post(f"/console/aurora/keys/{one}/revoke") for one in (foreign.id, uuid.uuid4())]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert ApiKey.objects.get(id=foreign.id).revoked_at is None


def test_a_key_is_shown_once(house: House) -> None:
    owner = house.people[Role.OWNER]
    form = {"name": "ci", "project": house.project.id, "days": 7, "made_id": MADE_ID}
    made = text_of(owner.post(house.at("keys"), form))
    (secret,) = re.findall(r"sk_\w+", made)
    stored = ApiKey.objects.get(name="ci")
    assert stored.secret_sha256 == api_keys.digest(api_keys.parse(secret).secret)
    assert timedelta(days=6) < stored.expires_at - timezone.now() <= timedelta(days=7)
    assert secret not in text_of(owner.get(house.at("keys")))


def test_a_developer_is_not_offered_keys_that_may_do_more(house: House) -> None:
    developer = house.people[Role.DEVELOPER]
    assert "management, as owner" not in text_of(developer.get(house.at("keys")))
    form = {"name": "x", "project": house.project.id, "role": "owner"}
    assert "Select a valid choice" in text_of(developer.post(house.at("keys"), form))
    assert not ApiKey.objects.filter(name="x").exists()


@pytest.mark.parametrize(
    ("page", "form", "sentence"),
    [
        ("keys", {"name": ""}, "This field is required"),
        ("keys", {"name": "x", "days": 0}, "greater than or equal to 1"),
        ("keys/{key}/rotate", {"grace": "forever"}, "Select a valid choice"),
        ("projects", {"name": "main", "default_class": "batch"}, "already exists"),
        ("projects", {"name": "x", "default_class": "urgent"}, "Select a valid choice"),
        ("alerts", {"priority_class": "batch", "measure": "money", "amount": "101"}, "between 1 and 100"),
        ("alerts", {"priority_class": "batch", "measure": "tokens", "amount": "many"}, "Enter a whole number"),
        ("members", {"email": "nobody", "role": "admin"}, "Enter a valid email"),
        ("members", {"email": "owner@aurora.example", "role": "admin"}, "is a member already"),
    ],
)
def test_a_wrong_form_says_what_would_be_right_and_changes_nothing(
    house: House, page: str, form: dict[str, Any], sentence: str
) -> None:
    before = AuditEvent.objects.count()
    assert sentence in text_of(house.people[Role.OWNER].post(house.at(page), {"made_id": MADE_ID, **form}))
    assert AuditEvent.objects.count() == before


def test_only_an_owner_makes_and_unmakes_owners(house: House) -> None:
    admin = house.people[Role.ADMIN]
    owner = Membership.objects.get(role="owner")
    form = {"email": "x@aurora.example", "role": "owner", "made_id": MADE_ID}
    refused = text_of(admin.post(house.at("members"), form))
    assert "only an owner makes owners" in refused
    for page, form in ((f"members/{owner.id}/role", {"role": "admin"}), (f"members/{owner.id}/remove", {})):
        told = text_of(admin.post(house.at(page), form, follow=True))
        assert "only an owner makes and unmakes owners" in told
    assert Membership.objects.filter(id=owner.id, role="owner").exists()


def test_the_last_owner_is_told_why_they_cannot_leave(house: House) -> None:
    owner = Membership.objects.get(role="owner")
    told = text_of(house.people[Role.OWNER].post(house.at(f"members/{owner.id}/remove"), follow=True))
    assert "keeps at least one owner" in told


def test_a_link_makes_an_account_and_a_member(house: House) -> None:
    reader = Client()
    assert "bob@aurora.example as <b>auditor</b>" in text_of(reader.get(f"/invitation/{house.token}"))
    form = {"username": "bob", "password": "a long enough one"}
    answer = reader.post(f"/invitation/{house.token}", form, follow=True)
    assert "You belong to Aurora now, as auditor" in text_of(answer)
    assert Membership.objects.get(user__username="bob").role == "auditor"
    assert Client().get(f"/invitation/{house.token}").status_code == 404


def test_a_link_makes_a_member_of_who_is_signed_in(house: House) -> None:
    eve = house.person("eve", None)
    eve.post(f"/invitation/{house.token}")
    assert Membership.objects.get(user__username="eve").email == "bob@aurora.example"


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"username": "owner", "password": "a long enough one"}, "this name is taken"),
        ({"username": "bob", "password": "short"}, "too short"),
        ({"username": "b o b", "password": "a long enough one"}, "Enter a valid username"),
    ],
)
def test_a_new_person_is_told_what_would_be_right(house: House, form: dict[str, str], sentence: str) -> None:
    assert sentence in text_of(Client().post(f"/invitation/{house.token}", form))
    assert Invitation.objects.get(id=house.invitation.id).ended_at is None


def test_who_is_no_operator_is_shown_no_operators_pages(house: House) -> None:
    member, visitor = house.person("new", None), Client()
    places = [(visitor, f"/invitation/{house.token}"), (visitor, "/invitation/nonsense"), (visitor, "/account/login/")]
    for client, place in [*places, (member, "/console/"), (member, "/account/logout/")]:
        page = text_of(client.get(place))
        assert ">Console</a>" in page
        assert [name for name in ("Live", "Policy", "Admin") if f">{name}</a>" in page] == [], place
    User.objects.filter(username="new").update(is_staff=True)
    assert ">Admin</a>" in text_of(member.get("/console/"))


@pytest.mark.parametrize("token", ["nonsense", "x" * 200, "%00"])
def test_a_link_that_is_none_says_so(house: House, token: str) -> None:
    answer = Client().get(f"/invitation/{token}")
    assert (answer.status_code, "This invitation has ended" in text_of(answer)) == (404, True)


def test_a_switched_off_tenant_has_no_pages(house: House) -> None:
    Tenant.objects.filter(id=house.tenant.id).update(is_active=False)
    assert house.people[Role.OWNER].get(house.at("")).status_code == 404


def test_the_way_in_leads_to_the_only_tenant(house: House) -> None:
    assert house.people[Role.BILLING].get("/console/")["Location"] == "/console/aurora/"
    assert "You belong to no tenant yet" in text_of(house.person("new", None).get("/console/"))


def test_nobody_signs_up_by_themselves(db: None) -> None:
    Client().post("/account/signup/", {"username": "eve", "password1": "a long enough one", "email": "e@e.example"})
    assert not User.objects.filter(username="eve").exists()


def test_signing_in_takes_a_name_or_an_address(house: House) -> None:
    for login in ("billing", "billing@aurora.example"):
        answer = Client().post("/account/login/", {"login": login, "password": "a long enough one"})
        assert answer["Location"] == "/console/"


def test_the_trail_says_what_happened_in_words(house: House) -> None:
    owner = house.people[Role.OWNER]
    owner.post(house.at("keys/{key}/rotate"), {"grace": "3600"})
    owner.post(house.at("keys/{key}/revoke"))
    page = text_of(owner.get(house.at("trail")))
    assert page.index("key revoked") < page.index("key rotated") < page.index("key made")


def test_whoever_comes_or_goes_is_on_the_trail_by_name_and_with_the_role(house: House) -> None:
    owner = house.people[Role.OWNER]
    key = {"name": "reports", "project": str(house.project.id), "role": "billing"}
    owner.post(house.at("keys"), {**key, "made_id": MADE_ID})
    owner.post(house.at("members"), {"email": "new@aurora.example", "role": "auditor", "made_id": MADE_ID})
    owner.post(house.at("members/{member}/remove"))
    page = " ".join(re.sub("<[^>]+>", " ", text_of(owner.get(house.at("trail")))).split())
    assert "key made reports role: billing" in page
    assert "invitation made new@aurora.example role: auditor" in page
    assert "member removed developer@aurora.example role: developer" in page


def test_whatever_changes_is_on_the_trail_by_name_and_with_its_request(house: House) -> None:
    owner = house.people[Role.OWNER]
    owner.post(house.at("members/{member}/role"), {"role": "auditor"})
    owner.post(house.at("members/{member}/remove"))
    owner.post(house.at("keys/{key}/rotate"), {"grace": "3600"})
    owner.post(house.at("keys/{key}/revoke"))
    hook = {"url": "https://hooks.example/rubato", "events": ["key.revoked"], "made_id": MADE_ID}
    owner.post(house.at("webhooks"), hook)
    endpoint = Endpoint.objects.get()
    owner.post(house.at(f"webhooks/{endpoint.id}/remove"))
    answer = owner.get(house.at("trail"))
    told = {(one.what, one.called) for one in answer.context["events"]}
    key, member = house.key.name, "developer@aurora.example"
    assert told >= {
        *(("key rotated", key), ("key revoked", key), ("member changed", member), ("member removed", member)),
        *(("webhook endpoint made", endpoint.url), ("webhook endpoint removed", endpoint.url)),
    }
    assert all(called for _, called in told)
    for one in answer.context["events"]:
        if one.event.actor != "tests":
            assert one.event.request_id.startswith("req_")
            assert one.event.request_id in text_of(answer)


@pytest.mark.parametrize("page", ["/operator/live", "/operator/policy/", "/operator/policy/classes", "/console/"])
def test_an_operator_can_sign_out_of_every_page(db: None, page: str) -> None:
    client = Client()
    user = User.objects.create_superuser("ops", password="a long enough one")
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    shown = text_of(client.get(page))
    assert (shown.count('action="/account/logout/"'), shown.count("Sign out")) == (1, 1)


def test_names_are_text_and_never_markup(house: House) -> None:
    services.create_project(actor="tests", tenant=house.tenant, name="<script>alert(1)</script>")
    page = text_of(house.people[Role.OWNER].get(house.at("projects")))
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert Project.objects.count() == 2


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


def test_a_key_with_an_end_says_when_it_ends(house: House) -> None:
    ApiKey.objects.filter(id=house.key.id).update(expires_at=datetime(2999, 1, 2, 3, 4, tzinfo=UTC))
    page = house.people[Role.OWNER].get(house.at("keys")).content.decode()
    assert re.search(r"open, ends <time[^>]*>2999-01-02 03:04 UTC", page)
