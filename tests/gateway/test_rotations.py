"""A secret that was promised until a moment lives until then: nobody ends it by rotating once more, unless they say so.

Secrets of keys, in the console and by the API, and secrets of webhooks.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from gateway.webhooks import services as webhooks
from gateway.webhooks.models import EVENTS, Endpoint
from tenants import services
from tenants.models import ApiKey
from tenants.refusals import StillGood
from tenants.roles import Role
from tests.gateway.at_once import at_once
from tests.gateway.management_world import House, as_owner, error, of_owner_and_operator, open_houses

WEEK = {"grace": "604800"}
SECRETS = ("secret_sha256", "previous_sha256", "previous_until")


@pytest.fixture
def aurora(transactional_db: None, settings: Any) -> House:
    return open_houses(settings)["aurora"]


def secrets(house: House) -> tuple[Any, ...]:
    stored = ApiKey.objects.get(id=house.key.key.id)
    return tuple(getattr(stored, name) for name in SECRETS)


def text_of(answer: Any) -> str:
    return re.sub(r"<[^>]*>", "", answer.content.decode())


def test_the_api_refuses_to_end_a_secret_before_its_time_and_says_until_when(aurora: House) -> None:
    place = f"api_keys/{aurora.key.key.id}/rotate"
    as_owner(aurora, "POST", place, {"grace_seconds": 604_800})
    before = secrets(aurora)
    for body in ({}, {"grace_seconds": 0}, {"end_previous_secret": False}):
        answer = as_owner(aurora, "POST", place, body)
        refused = error(answer)
        assert (answer.status_code, refused["code"], refused["param"]) == (409, "conflict", "end_previous_secret")
        assert answer["x-should-retry"] == "false"
        assert f"{before[2]:%Y-%m-%d %H:%M:%S} UTC" in refused["message"]
    assert secrets(aurora) == before
    ended = as_owner(aurora, "POST", place, {"end_previous_secret": True})
    assert (ended.status_code, secrets(aurora)[1]) == (200, before[0])


def test_of_six_rotations_at_once_one_is_done_and_five_are_told(aurora: House) -> None:
    place, first = f"api_keys/{aurora.key.key.id}/rotate", secrets(aurora)[0]
    aurora.management_key(Role.OWNER)  # made once, before the threads ask for it
    answers = at_once(lambda _: as_owner(aurora, "POST", place, {"grace_seconds": 60}), 6)
    assert Counter(answer.status_code for answer in answers) == {200: 1, 409: 5}
    (made,) = [answer.json() for answer in answers if answer.status_code == 200]
    stored = ApiKey.objects.get(id=aurora.key.key.id)
    assert (stored.last4, stored.previous_sha256) == (made["value"][-4:], first)


def test_a_secret_whose_time_has_come_keeps_no_rotation_back(aurora: House) -> None:
    place = f"api_keys/{aurora.key.key.id}/rotate"
    as_owner(aurora, "POST", place, {"grace_seconds": 60})
    ApiKey.objects.filter(id=aurora.key.key.id).update(previous_until=timezone.now())
    assert as_owner(aurora, "POST", place).status_code == 200
    as_owner(aurora, "POST", place, {"grace_seconds": 0, "end_previous_secret": True})
    assert as_owner(aurora, "POST", place).status_code == 200  # none went on


def test_the_page_names_what_it_would_end_and_does_it_for_a_tick_alone(aurora: House) -> None:
    browser, place = of_owner_and_operator(aurora), f"/console/aurora/keys/{aurora.key.key.id}/rotate"
    assert "end_previous" not in browser.get(place).content.decode()
    browser.post(place, WEEK)
    before = secrets(aurora)
    until, old = f"{before[2]:%Y-%m-%d %H:%M} UTC", f"…{aurora.key.key.last4}"
    page = text_of(browser.get(place))
    assert f"the secret {old} was to open until {until}" in page
    assert f"End the secret {old} now, which was to open until {until}" in page
    assert f"is good until {before[2]:%Y-%m-%d %H:%M:%S} UTC" in text_of(browser.post(place, WEEK))
    assert secrets(aurora) == before
    assert "was rotated" in text_of(browser.post(place, {**WEEK, "end_previous": "on"}))
    assert secrets(aurora)[1] == before[0]


def test_a_service_asked_without_a_form_refuses_too(aurora: House) -> None:
    asked = {"actor": "ann", "key_id": aurora.key.key.id, "env": "test", "grace": timedelta(days=1)}
    services.rotate_key(**asked)
    with pytest.raises(StillGood, match="Nothing was done"):
        services.rotate_key(**asked)
    assert issubclass(StillGood, ValidationError)


def test_a_webhook_s_secret_that_signs_for_a_day_is_ended_by_a_second_press_that_says_so(aurora: House) -> None:
    browser, page = of_owner_and_operator(aurora), "/console/aurora/webhooks"
    made = webhooks.add(actor="tests", tenant=aurora.tenant, url="https://aurora.example/hook", events=EVENTS)
    place = f"{page}/{made.id}/rotate"
    browser.post(place, {"seen": "1"})
    until = Endpoint.objects.get().previous_until
    assert f"signs too until {until:%Y-%m-%d %H:%M} UTC" in text_of(browser.get(page))
    asked = browser.post(place, {"seen": "2"}, follow=True)
    assert f"{until:%Y-%m-%d %H:%M:%S} UTC" in text_of(asked)
    assert Endpoint.objects.get().secret_number == 2
    sent = dict(re.findall(r'<input type="hidden" name="(seen|end_previous)" value="([^"]*)"', asked.content.decode()))
    assert "It has a new secret" in text_of(browser.post(place, sent, follow=True))
    assert Endpoint.objects.get().secret_number == 3
