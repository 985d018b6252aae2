"""The trail in the tenant's console: what happened, to whom, and by which request."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.webhooks.models import Endpoint
from tenants.roles import Role
from tests.gateway.tenant_console import MADE_ID, House, open_house, text_of


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    return open_house(settings)


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
