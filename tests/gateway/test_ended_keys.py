"""A key that has ended is recommended, offered and rotated nowhere, whichever way it ended and however new it is."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from tenants import services
from tenants.models import ApiKey
from tests.gateway.management_world import House, as_owner, error, of_owner_and_operator, open_houses

ENDS = ["revoked_at", "expires_at"]


@pytest.fixture
def aurora(transactional_db: None, settings: Any) -> House:
    return open_houses(settings)["aurora"]


def ended(house: House, end: str) -> ApiKey:
    """Newer than the one that is good."""
    key = services.issue_key(actor="tests", project=house.project, name="gone", env="test").key
    ApiKey.objects.filter(id=key.id).update(**{end: timezone.now()})
    return key


@pytest.mark.parametrize("end", ENDS)
def test_the_first_page_recommends_the_newest_key_that_is_good(aurora: House, end: str) -> None:
    ended(aurora, end)
    browser = of_owner_and_operator(aurora)
    assert "Use your key <b>app</b>" in browser.get("/console/aurora/").content.decode()
    assert ">app …" in browser.get("/console/aurora/batches").content.decode()
    ApiKey.objects.filter(id=aurora.key.key.id).update(**{end: timezone.now()})
    for page in ("", "batches"):
        assert "that opens anything now" in browser.get(f"/console/aurora/{page}").content.decode()


@pytest.mark.parametrize("end", ENDS)
def test_an_ended_key_is_not_offered_to_be_rotated_and_not_rotated_by_its_address(aurora: House, end: str) -> None:
    key, browser = ended(aurora, end), of_owner_and_operator(aurora)
    place = f"/console/aurora/keys/{key.id}/rotate"
    assert place not in browser.get("/console/aurora/keys").content.decode()
    for ask in (browser.get, browser.post):
        said = ask(place, {"grace": "0"}, follow=True).content.decode()
        assert "gone has ended, and cannot be rotated" in said
    refused = as_owner(aurora, "POST", f"api_keys/{key.id}/rotate")
    assert (refused.status_code, "cannot be rotated" in error(refused)["message"]) == (400, True)
    assert ApiKey.objects.get(id=key.id).rotated_at is None


def test_the_admin_makes_no_key_that_has_ended(aurora: House) -> None:
    form = {"project": str(aurora.project.pk), "name": "dead", "expires_at_0": "2020-01-01", "expires_at_1": "00:00"}
    made_id = "00000000-0000-4000-8000-000000000001"
    answer = of_owner_and_operator(aurora).post("/admin/tenants/apikey/add/", {**form, "made_id": made_id})
    assert "a key ends in the future" in answer.content.decode()
    assert not ApiKey.objects.filter(name="dead").exists()
