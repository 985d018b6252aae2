"""A form that books, or makes something with a secret, does so once, however often it is sent."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.test import Client
from django.urls import resolve, reverse

from billing.models import LedgerEntry
from gateway.batches import wishes
from gateway.batches.models import Batch
from gateway.console.urls import urlpatterns
from gateway.webhooks.models import Delivery, Endpoint
from tenants.models import ApiKey, AuditEvent, Invitation, Tenant
from tests.gateway.at_once import at_once, sender
from tests.gateway.management_world import House, of_owner_and_operator, open_houses

CORRECTION = "/admin/billing/ledgerentry/add/"


def without_tasks(settings: Any, files: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A house whose forms can all be sent: what they ask of Celery is not asked."""
    settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE = True
    settings.RUBATO_FILES_DIR = str(files)
    monkeypatch.setattr(wishes, "ask_for", lambda task, batch_id: None)
    return open_houses(settings)["aurora"]


@pytest.fixture
def aurora(transactional_db: None, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return without_tasks(settings, tmp_path, monkeypatch)


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


class Lines:
    """A file that is read from its beginning each time that it is sent."""

    name = "lines.jsonl"

    def read(self) -> bytes:
        return b"{}"


def batch(aurora: House) -> tuple[str, dict[str, Any], Callable[[], int]]:
    form = {"file": Lines(), "endpoint": "/v1/completions", "key": aurora.key.key.pk}
    return "/console/aurora/batches", form, Batch.objects.count


EVERY = [credit, adjustment, key, admin_key, invitation, endpoint, batch]


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


def test_a_batch_that_is_sent_twice_leads_to_the_first_and_keeps_one_file(
    aurora: House, browser: Client, tmp_path: Path
) -> None:
    page, form, _ = batch(aurora)
    form["made_id"] = hidden(browser, page)
    first, again = browser.post(page, form), browser.post(page, form)
    assert first["Location"] == again["Location"] == f"{page}/{Batch.objects.get().id}"
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


class Forms(HTMLParser):
    """The forms of a page that post: where to, and what they hold as they stand there."""

    def __init__(self, address: str, page: str) -> None:
        super().__init__()
        self.address = address
        self.found: list[tuple[str, dict[str, Any]]] = []
        self._form: dict[str, Any] | None = None
        self._select = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "form":
            self._form = {} if given.get("method") == "post" else None
            if self._form is not None:
                self.found.append((given.get("action") or self.address, self._form))
        elif self._form is None:
            return
        elif tag == "select":
            self._select = name
        elif tag == "option":
            if "selected" in given or self._select not in self._form:
                self._form[self._select] = given.get("value")
        elif name:
            is_hidden = given.get("type") == "hidden"
            self._form[name] = given.get("value") or ("" if is_hidden else TYPED[name])

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None


TYPED = {  # into boxes that a page leaves empty
    **{"file": Lines(), "name": "x", "email": "new@aurora.example", "url": "https://192.0.2.1/hook"},
    **{"amount": "9", "days": ""},
}
MAKING = {"alerts", "batches", "keys", "people", "projects", "webhooks"}


def ids_of(aurora: House, browser: Client) -> dict[str, Any]:
    """What the addresses of the console name, one of each."""
    for made in (batch, endpoint):
        page, form, _ = made(aurora)
        browser.post(page, {**form, "made_id": uuid.uuid4()})
    browser.post("/console/aurora/alerts", {"priority_class": "batch", "measure": "tokens", "amount": "7"})
    about = {"event": "batch.failed", "subject": "b", "payload": {}, "state": "dead"}
    ended = Delivery.objects.create(tenant=aurora.tenant, endpoint=Endpoint.objects.get(), **about)
    found = aurora.ids()
    return {
        **{"slug": "aurora", "kind": "csv", "table": "workers", "deed": "rotate", "token": "none"},
        **{"batch_id": Batch.objects.get().id, "file_id": Batch.objects.get().input_file_id},
        **{"endpoint_id": Endpoint.objects.get().id, "delivery_id": ended.id, "response_id": uuid.uuid4()},
        **{"key_id": found["key"], "statement_id": found["statement"], "member_id": found["member"]},
        **{"invitation_id": found["invite"], "threshold_id": aurora.tenant.thresholds.get().id},
    }


def forms_of(browser: Client, ids: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(name of its route, address, filled in) of every form on every page of the console, but for that to sign out."""
    found, ours = [], {pattern.name for pattern in urlpatterns}
    for pattern in urlpatterns:
        if pattern.name:
            given = {name: ids[name] for name in pattern.pattern.regex.groupindex}
            address = reverse(pattern.name, kwargs=given)
            answer = browser.get(address)
            if answer.status_code == 200 and answer["Content-Type"].startswith("text/html"):
                forms = Forms(address, answer.content.decode()).found
                found += [(str(resolve(action).url_name), action, filled) for action, filled in forms]
    return [form for form in found if form[0] in ours]


def rows() -> dict[str, int]:
    """How many of each thing there are, but for the trail and what signing in leaves."""
    kept = {model._meta.label: model._default_manager.count() for model in apps.get_models() if model is not AuditEvent}
    return {label: count for label, count in kept.items() if not label.startswith(("sessions.", "admin."))}


def test_no_form_of_the_console_makes_more_when_it_is_sent_again(valkey: str, aurora: House, browser: Client) -> None:
    making = set()
    for name, address, filled in forms_of(browser, ids_of(aurora, browser)):
        before = rows()
        assert browser.post(address, filled).status_code < 500, address
        once = rows()
        assert browser.post(address, filled).status_code < 500, address
        assert rows() == once, f"{address} makes a thing each time that it is sent"
        if any(once[label] > before[label] for label in once):
            making.add(name)
    assert making == {f"console-{name}" for name in MAKING}
