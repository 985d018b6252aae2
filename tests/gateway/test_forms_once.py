"""A form that books, or makes something with a secret, does so once, however often it is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from billing.models import LedgerEntry
from gateway.webhooks.models import Endpoint
from tenants.models import ApiKey, Invitation, Tenant
from tests.gateway.at_once import at_once, sender
from tests.gateway.management_world import House, of_owner_and_operator, open_houses

CORRECTION = "/admin/billing/ledgerentry/add/"


@pytest.fixture
def aurora(transactional_db: None, settings: Any) -> House:
    settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE = True
    return open_houses(settings)["aurora"]


@pytest.fixture
def browser(aurora: House) -> Client:
    return of_owner_and_operator(aurora)


def hidden(browser: Client, page: str, name: str = "made_id") -> str:
    return re.findall(rf'name="{name}" value="([^"]+)"', browser.get(page).content.decode())[0]


def credit(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    form = {"tenant": aurora.tenant.pk, "amount_micros": "55", "reason": "goodwill"}
    return CORRECTION, form, LedgerEntry.objects.filter(kind="credit").count


def adjustment(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    charged = LedgerEntry.objects.get(kind="settle", tenant_id=aurora.tenant.pk)
    form = {"operation_id": charged.operation_id, "amount_micros": "-3", "reason": "repair"}
    return CORRECTION, form, LedgerEntry.objects.filter(kind="adjust").count


def key(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    return "/console/aurora/keys", {"name": "x", "project": aurora.project.pk}, ApiKey.objects.filter(name="x").count


def admin_key(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    form = {"name": "x", "project": aurora.project.pk, "expires_at_0": "", "expires_at_1": ""}
    return "/admin/tenants/apikey/add/", form, ApiKey.objects.filter(name="x").count


def invitation(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    form = {"email": "new@aurora.example", "role": "auditor"}
    return "/console/aurora/members", form, Invitation.objects.filter(email=form["email"]).count


def endpoint(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    form = {"url": "https://192.0.2.1/hook", "events": ["batch.completed"]}
    return "/console/aurora/webhooks", form, Endpoint.objects.count


EVERY = [credit, adjustment, key, admin_key, invitation, endpoint]


@pytest.mark.parametrize("made", EVERY)
def test_a_form_that_is_sent_twice_makes_its_thing_once_and_says_so(aurora: House, browser: Client, made: Any) -> None:
    page, form, count = made(aurora)
    form["made_id"] = hidden(browser, page)
    browser.post(page, form)
    assert count() == 1
    again = browser.post(page, form, follow=True).content.decode()
    assert count() == 1
    assert "This form was sent before" in again
    browser.post(page, {**form, "made_id": hidden(browser, page)})
    assert count() == 2


@pytest.mark.parametrize("made", EVERY)
def test_a_form_that_is_sent_three_times_at_once_makes_its_thing_once(
    aurora: House, browser: Client, made: Any
) -> None:
    page, form, count = made(aurora)
    form["made_id"] = hidden(browser, page)
    answers = at_once(lambda _: sender(browser).post(page, form))
    assert count() == 1
    assert max(answer.status_code for answer in answers) < 500


@pytest.mark.parametrize("made_id", [None, "", "garbled"])
@pytest.mark.parametrize("made", EVERY)
def test_a_form_that_comes_without_its_number_makes_nothing_and_says_so(
    aurora: House, browser: Client, made: Any, made_id: str | None
) -> None:
    page, form, count = made(aurora)
    answer = browser.post(page, form if made_id is None else {**form, "made_id": made_id})
    assert "This form came without its own number" in answer.content.decode()
    assert count() == 0


def test_one_form_that_is_sent_for_two_tenants_books_once(aurora: House, browser: Client) -> None:
    page, form, count = credit(aurora)
    stranger = Tenant.objects.get(slug="stranger")
    form["made_id"] = hidden(browser, page)
    for_each = [form, {**form, "tenant": stranger.pk}, form]
    at_once(lambda number: sender(browser).post(page, for_each[number]))
    assert count() == 1
    assert "This form was sent before" in browser.post(page, for_each[1]).content.decode()
    assert count() == 1


def test_a_form_that_has_booked_books_nothing_else_either(aurora: House, browser: Client) -> None:
    page, form, count = credit(aurora)
    form["made_id"] = hidden(browser, page)
    browser.post(page, form)
    said = browser.post(page, {**form, "amount_micros": "56"}).content.decode()
    assert "55 micro-units (goodwill)" in said
    assert count() == 1


def test_a_browser_that_goes_back_to_a_correction_fills_nothing_in(browser: Client) -> None:
    text = browser.get(CORRECTION).content.decode()
    boxes = re.findall(r'<(?:input|select)[^>]*name="(?:operation_id|tenant|amount_micros|reason)"[^>]*>', text)
    assert len(boxes) == 4
    assert all('autocomplete="off"' in box for box in boxes)


def test_a_reload_of_a_rotated_key_s_page_leaves_its_new_secret(aurora: House, browser: Client) -> None:
    page = f"/console/aurora/keys/{aurora.key.key.id}/rotate"
    form = {"grace": "86400", "seen": hidden(browser, page, "seen")}
    browser.post(page, form)
    rotated = ApiKey.objects.get(id=aurora.key.key.id)
    assert "has been rotated since" in browser.post(page, form, follow=True).content.decode()
    after = ApiKey.objects.get(id=aurora.key.key.id)
    assert (after.secret_sha256, after.previous_sha256) == (rotated.secret_sha256, rotated.previous_sha256)


def test_a_second_press_of_rotate_leaves_a_webhook_s_new_secret(aurora: House, browser: Client) -> None:
    page, form, _ = endpoint(aurora)
    browser.post(page, {**form, "made_id": hidden(browser, page)})
    made = Endpoint.objects.get()
    seen = hidden(browser, page, "seen")
    browser.post(f"{page}/{made.id}/rotate", {"seen": seen})
    assert "newer secret" in browser.post(f"{page}/{made.id}/rotate", {"seen": seen}, follow=True).content.decode()
    assert Endpoint.objects.get().secret_number == 2
