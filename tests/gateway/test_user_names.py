"""The trail knows a person by their user name: nobody gets one that looks like another's, or like the product's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from tenants.models import ApiKey, Invitation, Membership
from tenants.user_names import OF_THE_PRODUCT
from tests.gateway.management_world import of_owner_and_operator, open_houses
from tests.gateway.tenant_console import House, open_house, text_of

PASSWORD = "a long enough one"
LOOKS_LIKE_ANOTHERS = {
    "full-width": "\uff21\uff24\uff2d\uff29\uff2e",
    "full-width of a free name": "\uff42\uff4f\uff42",
    "Cyrillic": "\u0430dmin",
    "a ligature": "\ufb01nn",
    "an accent": "b\u00f3b",
    "turned round": "x\u202ey",
    "invisible": "bo\u200bb",
    "in capitals": "ADMIN",
    "of a tool": "seed_demo",
    "of a tool, in capitals": "Settler",
    "a key's": "key:app abc",
    "SQL's": "sql:app_ops",
    "the platform's": "the platform",
    "with markup": "<b>bob",
    "with a line break": "bob\nadmin",
}
MADE_PLAIN = ("full-width of a free name", "a ligature")  # by the admin, before it looks


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    return open_house(settings)  # with an admin


@pytest.fixture
def operator(transactional_db: None, settings: Any) -> Client:
    User.objects.create_user("admin")
    return of_owner_and_operator(open_houses(settings)["aurora"])


@pytest.mark.parametrize("name", LOOKS_LIKE_ANOTHERS.values(), ids=LOOKS_LIKE_ANOTHERS)
def test_nobody_joins_under_a_name_that_may_be_taken_for_anothers(house: House, name: str) -> None:
    before = User.objects.count()
    answer = Client().post(f"/invitation/{house.token}", {"username": name, "password": PASSWORD})
    assert answer.status_code == 200
    assert re.search("this name is taken|Enter a valid username|signs with this name", text_of(answer))
    assert (User.objects.count(), Invitation.objects.get(id=house.invitation.id).ended_at) == (before, None)


@pytest.mark.parametrize("kind", [kind for kind in LOOKS_LIKE_ANOTHERS if kind not in MADE_PLAIN])
def test_no_operator_gives_such_a_name(operator: Client, kind: str) -> None:
    name = LOOKS_LIKE_ANOTHERS[kind]
    form = {"username": name, "usable_password": "true", "password1": PASSWORD, "password2": PASSWORD}
    before = list(User.objects.order_by("id").values_list("username", flat=True))
    assert "Please correct the error" in text_of(operator.post("/admin/auth/user/add/", form))
    carl = User.objects.create_user("carl")
    renamed = {"username": name, "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    assert "Please correct the error" in text_of(operator.post(f"/admin/auth/user/{carl.id}/change/", renamed))
    assert list(User.objects.order_by("id").values_list("username", flat=True)) == [*before, "carl"]


def test_an_operator_may_change_all_else_of_who_has_an_older_name_and_the_case_of_a_name(operator: Client) -> None:
    for old, new in (("j\u00fcrgen", "j\u00fcrgen"), ("carl", "Carl")):
        user = User.objects.create_user(old)
        form = {"username": new, "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00", "last_name": "Koch"}
        assert operator.post(f"/admin/auth/user/{user.id}/change/", form).status_code == 302
        user.refresh_from_db()
        assert (user.username, user.last_name) == (new, "Koch")


@pytest.mark.parametrize(("name", "is_taken"), [("Bob@aurora.example", True), ("owner@aurora.example", False)])
def test_a_name_that_is_an_address_is_ones_own(house: House, name: str, is_taken: bool) -> None:
    answer = Client().post(f"/invitation/{house.token}", {"username": name, "password": PASSWORD})
    assert answer.status_code == (302 if is_taken else 200)
    assert Membership.objects.filter(user__username=name).exists() == is_taken


def test_all_that_the_product_signs_with_is_its_own(project_root: Path) -> None:
    found = set()
    for folder in ("platform", "tenants", "billing"):
        for file in (project_root / folder).rglob("*.py"):
            found |= set(re.findall(r'\b(?:ACTOR|_PLATFORM) = "([^"]+)"|actor="([^"]+)"', file.read_text("utf-8")))
    signed = {one or other for one, other in found}
    assert {name for name in signed if " " not in name} == OF_THE_PRODUCT
    assert re.fullmatch(r"key:\w+ \w+", ApiKey(name="app", public_id="abc").actor)
