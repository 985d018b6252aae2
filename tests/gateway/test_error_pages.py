"""What is said of a request that failed is said whatever its body is: no error's page reads it again."""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlencode

import pytest
from django.test import Client

from tests.gateway.people import signed_in

CSRF = "a" * 32  # with a cookie a form's token is looked for in the body
FORM = "application/x-www-form-urlencoded"
TOO_MANY = urlencode([("a", "b")] * 1_001).encode()
BODIES = {
    "another character set": (f"{FORM}; charset=utf-16", b"a=b"),
    "one that nobody knows": (f"{FORM}; charset=klingon", b"a=b"),
    "too many fields": (FORM, TOO_MANY),
    "no boundary": ("multipart/form-data", b"a=b"),
    "broken off": ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name"),
    "too many parts": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n' * 1_001 + b"--x--\r\n",
    ),
    "not even a form": ("text/plain", b"\xff\0"),
}


def answers(browser: Client, path: str, body: str) -> Any:
    kind, content = BODIES[body]
    browser.cookies["csrftoken"] = CSRF
    browser.raise_request_exception = False
    return browser.generic("POST", path, content, kind)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "path",
    [
        *("/account/login/", "/account/password/reset/", "/account/logout/", "/admin/login/", "/invitation/x"),
        *("/console/aurora/keys", "/operator/policy/", "/admin/", "/nowhere", "/console/aurora/nowhere"),
    ],
)
def test_no_body_makes_an_error_of_ours_out_of_an_answer(transactional_db: None, path: str, body: str) -> None:
    for is_strict in (False, True):
        answer = answers(Client(enforce_csrf_checks=is_strict), path, body)
        assert answer.status_code < 500, (is_strict, answer.content)


@pytest.mark.parametrize("body", ["another character set", "too many fields"])
def test_the_page_of_a_400_is_there_and_the_log_tells_no_failure(
    transactional_db: None, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answers(Client(enforce_csrf_checks=True), "/account/login/", body)
    assert (answer.status_code, "This request cannot be read" in answer.content.decode()) == (400, True)
    told = [record for record in caplog.records if record.levelno >= logging.ERROR and record.name == "django.request"]
    assert told == []


@pytest.mark.parametrize("body", [body for body in BODIES if body != "another character set"])  # that is a 400 anywhere
def test_the_pages_of_403_404_and_500_read_no_body_either(
    transactional_db: None, body: str, django_user_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    nobody = django_user_model.objects.create_user("clerk", password="x", is_staff=True)
    assert answers(signed_in(nobody), "/operator/policy/", body).status_code == 403
    gone = answers(Client(enforce_csrf_checks=True), "/nowhere", body)
    assert (gone.status_code, "There is no such page" in gone.content.decode()) == (404, True)
    monkeypatch.setattr("gateway.console.middleware.BackToItsPage.before", fail)
    failed = answers(Client(enforce_csrf_checks=True), "/nowhere", body)
    assert (failed.status_code, "Something went wrong" in failed.content.decode()) == (500, True)
