"""What one person writes and others read turns round nothing that stands beside it: refused in words, or left out."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, models
from django.test import Client

from billing import services as billing_services
from billing.models import LedgerEntry
from tenants import proposals, selectors, services
from tenants.models import AuditEvent
from tests.gateway.management_world import House, as_owner, of_owner_and_operator, open_houses
from tests.gateway.tenant_console import text_of

TURNS = ["\u061c", "\u200f", "\u202e", "\u2066"]
NAMED = ["alm", "rlm", "rlo", "lri"]
REFUSED = "invisible characters that change the direction of writing"


@pytest.fixture
def aurora(transactional_db: None, settings: Any, tmp_path: Any) -> House:
    settings.RUBATO_FILES_DIR = str(tmp_path)
    settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE = True
    return open_houses(settings)["aurora"]


@pytest.fixture
def browser(aurora: House) -> Client:
    return of_owner_and_operator(aurora)


def an_edit(aurora: House) -> str:
    current = selectors.current_policy()
    assert current is not None
    document = selectors.live_policy(current.version)
    document["tenants"][0]["weight"] += 1
    return str(proposals.draft(actor="aurora-ann", document=document, based_on=current.version).id)


def forms(aurora: House, text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Every form in which somebody writes freely, by what it writes."""
    ids, console, tenant = aurora.ids(), "/console/aurora", aurora.tenant.pk
    correction, row = "/admin/billing/ledgerentry/add/", f"/admin/tenants/tenant/{tenant}/change/"
    charged = LedgerEntry.objects.get(kind="settle", tenant_id=tenant).operation_id
    same = {"name": "Aurora", "timezone": "UTC", "is_active": "on"}
    opened = {f"initial-{name}": value for name, value in same.items()}
    until = {"expires_at_0": "", "expires_at_1": ""}
    return {
        "credit": (correction, {"tenant": tenant, "amount_micros": "5", "reason": text}),
        "adjustment": (correction, {"operation_id": charged, "amount_micros": "-3", "reason": text}),
        "edit of a tenant": (row, {**opened, **same, "timezone": "Europe/Vienna", "reason": text}),
        "name of a tenant": (row, {**opened, **same, "name": text, "reason": "why"}),
        "new tenant": ("/admin/tenants/tenant/add/", {"slug": "vega", "name": text, "timezone": "UTC"}),
        "new project": ("/admin/tenants/project/add/", {"tenant": tenant, "name": text, "default_class": "batch"}),
        "new key": ("/admin/tenants/apikey/add/", {"project": ids["project"], "name": text, **until}),
        "project": (f"{console}/projects", {"name": text, "default_class": "batch"}),
        "key": (f"{console}/keys", {"name": text, "project": ids["project"]}),
        "invitation": (f"{console}/members", {"email": f"x{text}@aurora.example", "role": "auditor"}),
        "webhook": (f"{console}/webhooks", {"url": f"https://192.0.2.1/{text}", "events": ["batch.completed"]}),
        "edit of the policy": (
            f"/operator/policy/edits/{an_edit(aurora)}",
            {"action": "send", "reason": text},
        ),
        "pause": (f"/operator/policy/pause/{tenant}/default", {"action": "pause", "reason": text}),
    }


def written() -> str:
    """All texts of all our rows, and of the people."""
    found = []
    for model in apps.get_models():
        is_ours = model.__module__.startswith(("tenants.", "billing.", "gateway.", "django.contrib.auth."))
        written_in = models.CharField | models.TextField | models.JSONField
        columns = [one.column for one in model._meta.concrete_fields if isinstance(one, written_in)]
        if is_ours and model._meta.managed and columns:
            whole = " || ' ' || ".join(f"coalesce(\"{name}\"::text, '')" for name in columns)
            with connection.cursor() as cursor:
                cursor.execute(f'SELECT {whole} FROM "{model._meta.db_table}"')
                found += [row[0] for row in cursor.fetchall()]
    return "\n".join(found)


@pytest.mark.parametrize("turn", TURNS, ids=NAMED)
def test_a_form_with_such_a_character_is_refused_and_leaves_none_of_it(
    aurora: House, browser: Client, turn: str
) -> None:
    for what, (page, form) in forms(aurora, f"safe{turn}txt").items():
        answer = browser.post(page, {**form, "made_id": uuid4()}, follow=True)
        own_words = {"invitation": "Enter a valid email", "webhook": "the URL has blanks in it"}
        assert own_words.get(what, REFUSED) in text_of(answer), what
        assert turn not in written(), what


def test_the_same_forms_without_it_are_taken(aurora: House, browser: Client) -> None:
    """Else their refusal says nothing. Text that is written from the right is text like any other."""
    latin_alone = {"invitation": "x", "webhook": "x"}
    for number, what in enumerate(forms(aurora, "")):
        text = f"{latin_alone.get(what, 'مرحبا')}{number}"
        page, form = forms(aurora, text)[what]
        answer = browser.post(page, {**form, "made_id": uuid4()}, follow=True)
        assert REFUSED not in text_of(answer), what
        assert text in written(), what


@pytest.mark.parametrize("turn", TURNS, ids=NAMED)
def test_what_comes_without_a_form_of_its_own_is_kept_without_it(aurora: House, browser: Client, turn: str) -> None:
    """The name of a file, and the reason that any form may bring for the trail."""
    form = {"name": "web", "default_class": "batch", "reason": f"for{turn} them"}
    browser.post("/console/aurora/projects", form)
    assert AuditEvent.objects.filter(object_type="project").first().reason == "for them"
    upload = SimpleUploadedFile(f"gpj{turn}.jsonl", b"{}")
    form = {"file": upload, "endpoint": "/v1/chat/completions", "key": aurora.key.key.pk, "made_id": uuid4()}
    answer = browser.post("/console/aurora/batches", form)
    assert answer.status_code == 302, text_of(answer)
    assert "gpj.jsonl" in written()
    assert turn not in written()


@pytest.mark.parametrize("turn", TURNS, ids=NAMED)
def test_by_program_it_is_refused_too(aurora: House, turn: str) -> None:
    route = f"projects/{aurora.project.pk}/api_keys"
    for asked, body in (("projects", {"name": turn}), (route, {"name": turn})):
        answer = as_owner(aurora, "POST", asked, body)
        assert (answer.status_code, REFUSED in answer.json()["error"]["message"]) == (400, True)
    for deed in (
        lambda: billing_services.credit(actor="x", tenant_id=aurora.tenant.pk, amount_micros=1, reason=turn),
        lambda: services.switch_class(
            actor="x", tenant_id=aurora.tenant.pk, label="default", is_paused=True, reason=turn
        ),
    ):
        with pytest.raises(Exception, match=REFUSED):
            deed()


NAMING = ("name of a tenant", "new tenant", "new project", "new key", "project", "key")


@pytest.mark.parametrize(
    ("name", "words"),
    [("\u200b", "nothing of this name can be seen"), ("night\nshift", "a name is one line")],
    ids=["zero width", "line break"],
)
def test_a_name_of_nothing_or_of_two_lines_is_refused_by_form_and_by_program(
    aurora: House, browser: Client, name: str, words: str
) -> None:
    found = forms(aurora, name)
    for what in NAMING:
        page, form = found[what]
        answer = browser.post(page, {**form, "made_id": uuid4()}, follow=True)
        assert words in text_of(answer), what
    for route in ("projects", f"projects/{aurora.project.pk}", f"projects/{aurora.project.pk}/api_keys"):
        refusal = as_owner(aurora, "POST", route, {"name": name}).json()["error"]
        assert (refusal["param"], words in refusal["message"]) == ("name", True), route
    assert name not in written()
