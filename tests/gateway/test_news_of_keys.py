"""What is said of a key's end where gateways were told, and where nobody could tell them: never more than is so."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from gateway.auth import KEY_TTL_S
from tenants import news, services
from tenants.models import ApiKey
from tenants.roles import Role
from tests.gateway.management_world import House, as_owner, of_owner_and_operator, open_houses

NOWHERE = "redis://127.0.0.1:1/0"
UNTOLD = "This is saved, and not in force yet: gateways that could not be told"
TOLD = "opens nothing from now on"


@pytest.fixture(params=[True, False], ids=["told", "untold"])
def is_told(request: pytest.FixtureRequest, transactional_db: None, valkey: str, settings: Any) -> bool:
    if not request.param:
        settings.REDIS_URL = NOWHERE
    return bool(request.param)


@pytest.fixture
def aurora(is_told: bool, settings: Any) -> House:
    return open_houses(settings)["aurora"]


def console(house: House) -> str:
    page = f"/console/aurora/keys/{house.key.key.id}/revoke"
    return str(of_owner_and_operator(house).post(page, follow=True).content.decode())


def admin(house: House) -> str:
    form = {"action": "revoke", "_selected_action": [str(house.key.key.id)]}
    answer = of_owner_and_operator(house).post("/admin/tenants/apikey/", form, follow=True)
    return str(answer.content.decode())


@pytest.mark.parametrize("way", [console, admin])
def test_a_revocation_says_on_a_page_whether_gateways_know_of_it(
    aurora: House, is_told: bool, way: Callable[[House], str]
) -> None:
    said = way(aurora)
    assert (TOLD in said) is is_told
    assert (
        f"pp is revoked. {UNTOLD} refuse it within 30 s at the latest." in said
    ) is not is_told  # "App" in the admin
    assert ApiKey.objects.get(id=aurora.key.key.id).revoked_at is not None


def test_the_api_says_of_a_revocation_and_of_a_rotation_whether_gateways_know_of_it(
    aurora: House, is_told: bool
) -> None:
    place = f"api_keys/{aurora.key.key.id}"
    assert as_owner(aurora, "POST", f"{place}/rotate").json()["gateways_told"] is is_told
    assert as_owner(aurora, "DELETE", place).json()["gateways_told"] is is_told
    assert as_owner(aurora, "DELETE", place).json()["gateways_told"] is None  # had ended before


def test_a_rotation_says_on_its_page_that_gateways_still_go_by_the_former_secret(aurora: House, is_told: bool) -> None:
    page = f"/console/aurora/keys/{aurora.key.key.id}/rotate"
    said = of_owner_and_operator(aurora).post(page, {"grace": "0"}).content.decode()
    assert "app was rotated" in said
    assert (f"{UNTOLD} go by the former secret" in said) is not is_told


def test_a_management_key_needs_no_telling(aurora: House) -> None:
    boss = services.issue_key(actor="tests", project=aurora.project, name="boss", env="test", role=Role.AUDITOR).key
    assert as_owner(aurora, "POST", f"api_keys/{boss.id}/rotate").json()["gateways_told"] is True
    assert as_owner(aurora, "DELETE", f"api_keys/{boss.id}").json()["gateways_told"] is True


def test_the_question_and_the_trail_name_the_latest_moment(aurora: House) -> None:
    browser, page = of_owner_and_operator(aurora), f"/console/aurora/keys/{aurora.key.key.id}/revoke"
    words = "gateways refuse it within a second, those that cannot be told within 30 s at the latest"
    assert words in browser.get(page).content.decode()
    assert words not in browser.get("/console/aurora/trail").content.decode()
    browser.post(page)
    assert words in browser.get("/console/aurora/trail").content.decode()


def test_the_latest_moment_is_that_of_what_a_gateway_keeps() -> None:
    again = timedelta(seconds=KEY_TTL_S) + timedelta(seconds=5)  # sockets and streams look five seconds later
    assert f"within {again.seconds} s" in news.LATEST
