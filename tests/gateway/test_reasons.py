"""The reason that any form and any call may bring for the trail is kept as far as it can be, and breaks nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.test import Client

from tenants import audit
from tenants.models import AuditEvent
from tenants.roles import Role
from tests.gateway.management_world import House, call, of_owner_and_operator
from tests.gateway.test_forms_once import forms_of, ids_of, without_tasks
from tests.gateway.test_one_direction import forms

NUL = "a\0b"


@pytest.fixture
def aurora(transactional_db: None, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return without_tasks(settings, tmp_path, monkeypatch)


@pytest.fixture
def browser(aurora: House) -> Client:
    return of_owner_and_operator(aurora)


def reasons() -> set[str]:
    return set(AuditEvent.objects.values_list("reason", flat=True))


def test_a_reason_with_a_nul_is_kept_without_it_at_every_form_of_the_console(
    valkey: str, aurora: House, browser: Client
) -> None:
    sent = {}
    for number, (_, address, filled) in enumerate(forms_of(browser, ids_of(aurora, browser))):
        answer = browser.post(address, {**filled, "reason": f"{number}{NUL}"})
        assert answer.status_code < 500, address
        sent[address] = f"{number}ab"
    assert sum(reason in reasons() for reason in sent.values()) >= 10


def test_no_field_of_any_form_of_the_console_is_broken_by_a_nul(valkey: str, aurora: House, browser: Client) -> None:
    found = forms_of(browser, ids_of(aurora, browser))
    for _, address, filled in found:
        for field in filled:
            assert browser.post(address, {**filled, field: NUL}).status_code < 500, (address, field)


def test_no_form_of_the_desk_or_of_the_admin_is_broken_by_a_nul(aurora: House, browser: Client) -> None:
    for what, (page, form) in forms(aurora, NUL).items():
        answer = browser.post(page, {"reason": NUL, **form, "made_id": uuid4()})
        assert answer.status_code < 500, what


def test_a_call_of_the_management_api_brings_its_reason_too(aurora: House) -> None:
    for reason, kept in ((NUL, "ab"), ("x" * (audit.LONGEST_REASON + 1), "x" * audit.LONGEST_REASON)):
        headers = {"X-Audit-Reason": reason}
        answer = call(aurora.management_key(Role.OWNER), "POST", "projects", {"name": uuid4().hex}, headers)
        assert answer.status_code == 201
        assert kept in reasons()
