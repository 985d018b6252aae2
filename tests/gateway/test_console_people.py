"""People of the tenant's console: who makes owners, where a link leads, and how somebody signs in."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tenants.models import Invitation, Membership
from tenants.roles import Role
from tests.gateway.tenant_console import House, open_house, text_of


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    return open_house(settings)


def test_the_last_owner_is_told_why_they_cannot_leave(house: House) -> None:
    owner = Membership.objects.get(role="owner")
    told = text_of(house.people[Role.OWNER].post(house.at(f"members/{owner.id}/remove"), follow=True))
    assert "keeps at least one owner" in told


def test_to_remove_somebody_is_asked_first_and_of_oneself_in_other_words(house: House) -> None:
    owner = house.people[Role.OWNER]
    places = {role: house.at(f"members/{Membership.objects.get(role=role).id}/remove") for role in ("owner", "auditor")}
    page = text_of(owner.get(house.at("members")))
    for place in places.values():
        assert f'<a href="{place}">' in page
        assert f'action="{place}"' not in page
    assert "Give up your own membership of Aurora?" in text_of(owner.get(places["owner"]))
    asked = text_of(owner.get(places["auditor"]))
    assert "Remove auditor@aurora.example?" in asked
    assert "only an invitation opens them again" in asked
    assert Membership.objects.filter(role="auditor").exists()
    owner.post(places["auditor"])
    assert not Membership.objects.filter(role="auditor").exists()


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


@pytest.mark.parametrize("token", ["nonsense", "x" * 200, "%00"])
def test_a_link_that_is_none_says_so(house: House, token: str) -> None:
    answer = Client().get(f"/invitation/{token}")
    assert (answer.status_code, "This invitation has ended" in text_of(answer)) == (404, True)


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
