"""A form that is sent after its sign-in has ended: nothing is done, that is said, and the log-in leads to its page."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from gateway.console import urls as console_urls
from gateway.desk import urls as desk_urls
from tests.gateway.desk_world import open_house

PAGE = "http://testserver/operator/policy/?q=a"
LED_TO = "?next=/operator/policy/%3Fq%3Da"
PARTS = {"slug": "aurora", "table": "workers", "deed": "rotate", "kind": "csv", "number": 1, "label": "default"}


def addresses() -> Iterator[str]:
    """One of each page for people."""
    for route in [*console_urls.urlpatterns, *desk_urls.urlpatterns]:
        if route.name is not None and route.name != "console-invitation":
            parts = route.pattern.regex.groupindex
            yield reverse(route.name, kwargs={part: PARTS.get(part, uuid.UUID(int=1)) for part in parts})


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def test_the_log_in_leads_to_the_page_that_sent_the_form_and_never_to_where_it_was_sent(transactional_db: None) -> None:
    answers = {address: Client().post(address, headers={"Referer": PAGE}) for address in addresses()}
    assert {answer.status_code for answer in answers.values()} == {302, 405}
    led = {address: answer["Location"] for address, answer in answers.items() if answer.status_code == 302}
    assert [address for address in led if not led[address].endswith(LED_TO)] == []
    assert reverse("desk-pause", args=[uuid.UUID(int=1), "default"]) in led


def test_a_pause_without_a_sign_in_says_that_nothing_was_done_and_ends_on_the_page_it_was_pressed_on(
    house: Any,
) -> None:
    User.objects.create_superuser("ops", password="a long enough one")
    address = f"/operator/policy/pause/{house.tenant.id}/default"
    client = Client()
    answer = client.post(address, {"action": "pause"}, headers={"HX-Request": "true", "HX-Current-URL": PAGE})
    assert answer["HX-Redirect"] == f"/admin/login/{LED_TO}"
    door = client.get(answer["HX-Redirect"], follow=True)
    assert "Nothing was done: the sign-in of that page had ended." in door.content.decode()
    form = {"login": "ops", "password": "a long enough one", "next": "/operator/policy/?q=a"}
    desk = client.post(f"/account/login/{LED_TO}", form, follow=True)
    assert (desk.status_code, desk.request["PATH_INFO"]) == (200, "/operator/policy/")
    assert ">Pause<" in desk.content.decode()
    assert "Nothing was done" not in desk.content.decode()


@pytest.mark.parametrize("page", ["", "https://elsewhere.example/operator/policy/", "http://["])
def test_without_a_page_of_ours_the_log_in_leads_to_where_everybody_begins(transactional_db: None, page: str) -> None:
    answer = Client().post(f"/operator/policy/pause/{uuid.UUID(int=1)}/default", headers={"Referer": page})
    assert answer["Location"] == "/admin/login/?next=/console/"
