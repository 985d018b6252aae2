"""The tenant's console: who may open which page, what each form refuses, and what keys it makes."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from tenants import api_keys, members, services
from tenants.models import ApiKey, AuditEvent, Membership, Project, Tenant
from tenants.roles import Capability, Role, may
from tests.gateway.tenant_console import MADE_ID, House, open_house, text_of

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
    "members/{member}/remove": Capability.MANAGE_MEMBERS,
    "alerts": Capability.MANAGE_WEBHOOKS,
    "trail": Capability.SEE_AUDIT,
}
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


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    return open_house(settings)


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


def test_no_page_of_a_tenant_is_kept_by_a_browser(house: House) -> None:
    """Whoever goes back in a tab after a sign-out sees none of them."""
    for page in PAGES:
        assert "no-store" in house.people[Role.OWNER].get(house.at(page))["Cache-Control"], page


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


def test_who_is_no_operator_is_shown_no_operators_pages(house: House) -> None:
    member, visitor = house.person("new", None), Client()
    places = [(visitor, f"/invitation/{house.token}"), (visitor, "/invitation/nonsense"), (visitor, "/account/login/")]
    for client, place in [*places, (member, "/console/"), (member, "/account/logout/")]:
        page = text_of(client.get(place))
        assert ">Console</a>" in page
        assert [name for name in ("Live", "Policy", "Admin") if f">{name}</a>" in page] == [], place
    User.objects.filter(username="new").update(is_staff=True)
    assert ">Admin</a>" in text_of(member.get("/account/logout/"))


def test_a_switched_off_tenant_has_no_pages_and_its_members_read_why(house: House) -> None:
    Tenant.objects.filter(id=house.tenant.id).update(is_active=False)
    owner, before = house.people[Role.OWNER], AuditEvent.objects.count()
    answers = [owner.get(house.at(page)) for page in PAGES]
    answers += [owner.post(house.at(page), form) for page, (_, form) in CHANGES.items()]
    assert {answer.status_code for answer in answers} == {404}
    for page in [*answers, owner.get("/console/")]:
        assert "<b>Aurora</b> is switched off" in text_of(page)
        assert "belong to no tenant" not in text_of(page)
    assert AuditEvent.objects.count() == before
    assert "Aurora" not in text_of(house.person("stranger", None).get(house.at("")))


def test_a_switched_off_tenant_stands_beside_others_and_opens_nothing(house: House) -> None:
    owner = Membership.objects.get(role="owner").user
    others = [services.create_tenant(actor="tests", slug=slug, name=slug.title()) for slug in ("nova", "vega")]
    for one in others:
        members.add_member(actor="tests", tenant=one, user=owner, email=owner.email, role=Role.AUDITOR)
    Tenant.objects.filter(id=house.tenant.id).update(is_active=False)
    page = text_of(house.people[Role.OWNER].get("/console/"))
    assert [f'href="/console/{slug}/"' in page for slug in ("aurora", "nova", "vega")] == [False, True, True]
    assert "<b>Aurora</b> is switched off" in page
    Tenant.objects.filter(slug="nova").update(is_active=False)
    assert house.people[Role.OWNER].get("/console/")["Location"] == "/console/vega/"


@pytest.mark.parametrize("page", ["/operator/live", "/operator/policy/", "/operator/policy/classes", "/console/"])
def test_an_operator_can_sign_out_of_every_page(db: None, page: str) -> None:
    client = Client()
    user = User.objects.create_superuser("ops", password="a long enough one")
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    shown = text_of(client.get(page, follow=True))
    assert (shown.count('action="/account/logout/"'), shown.count("Sign out")) == (1, 1)


def test_names_are_text_and_never_markup(house: House) -> None:
    services.create_project(actor="tests", tenant=house.tenant, name="<script>alert(1)</script>")
    page = text_of(house.people[Role.OWNER].get(house.at("projects")))
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert Project.objects.count() == 2


def test_a_key_with_an_end_says_when_it_ends(house: House) -> None:
    ApiKey.objects.filter(id=house.key.id).update(expires_at=datetime(2999, 1, 2, 3, 4, tzinfo=UTC))
    page = house.people[Role.OWNER].get(house.at("keys")).content.decode()
    assert re.search(r"open, ends <time[^>]*>2999-01-02 03:04 UTC", page)
