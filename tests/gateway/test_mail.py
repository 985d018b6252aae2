"""Forgotten passwords: a mail where there is a server for it, else an honest page, and never a link in a log."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.core.management import call_command
from django.test import Client
from django.urls import get_resolver

from gateway import logs
from gateway.urls import BY_MAIL
from tests.gateway.tenant_console import text_of

ADDRESS = "ann@aurora.example"
ANY_MAIL = {"EMAIL_HOST": "smtp.example", "DEFAULT_FROM_EMAIL": "rubato@llm.example"}


@pytest.fixture
def ann(db: None) -> User:
    return User.objects.create_user("ann", ADDRESS, "a long enough one")


def ask(client: Client) -> str:
    return text_of(client.post("/account/password/reset/", {"email": ADDRESS}, follow=True))


def test_with_a_mail_server_the_link_in_the_mail_sets_a_new_password(
    ann: User, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings.EMAIL_HOST, client = "smtp.example", Client()
    assert "sent you an email" in ask(client)
    (sent,) = mail.outbox
    assert (sent.to, sent.subject.startswith("Rubato: ")) == ([ADDRESS], True)
    (link,) = re.findall(r"http://testserver(/account/password/reset/key/\S+)", str(sent.body))
    form = client.get(link, follow=True).redirect_chain[-1][0]
    client.post(form, {"password1": "quite another one", "password2": "quite another one"})
    assert Client().login(username="ann", password="quite another one")
    assert link.rstrip("/").rpartition("/")[2] not in caplog.text


@pytest.mark.parametrize("place", BY_MAIL)
def test_without_a_mail_server_no_page_promises_a_mail_and_none_is_made(
    ann: User, settings: Any, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings.EMAIL_HOST, client = "", Client()
    client.force_login(ann, backend="django.contrib.auth.backends.ModelBackend")
    for answer in (client.get(f"/account/{place}/"), client.post(f"/account/{place}/", {"email": ADDRESS})):
        page = text_of(answer)
        assert "This platform sends no mail" in page
        assert "manage.py changepassword" in page
        assert not re.search("sent you|send you an", page)
    assert mail.outbox == []
    assert "/key/" not in "".join(capfd.readouterr())


def test_every_page_of_the_log_in_that_sends_mail_is_among_them(ann: User, settings: Any) -> None:
    """Whatever else is sent a form, with a mail server or without, mails nothing."""
    settings.EMAIL_HOST, client = "smtp.example", Client()
    client.force_login(ann, backend="django.contrib.auth.backends.ModelBackend")
    found = get_resolver("allauth.account.urls").url_patterns
    places = [str(one.pattern).strip("/") for one in found if "<" not in str(one.pattern)]
    others = [place for place in places if place not in BY_MAIL and place != "logout"]
    assert len(others) > 3
    for place in others:
        client.post(f"/account/{place}/", {"email": ADDRESS, "login": ADDRESS})
    assert mail.outbox == []


@pytest.mark.parametrize("way", ["admin", "command"])
def test_an_operator_gives_a_new_password_as_the_page_says(
    ann: User, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "command":
        monkeypatch.setattr("getpass.getpass", lambda prompt: "quite another one")
        call_command("changepassword", "ann")
    else:
        client = Client()
        client.force_login(User.objects.create_superuser("ops"), backend="django.contrib.auth.backends.ModelBackend")
        form = {"usable_password": "true", "password1": "quite another one", "password2": "quite another one"}
        client.post(f"/admin/auth/user/{ann.pk}/password/", form)
    assert Client().login(username="ann", password="quite another one")


def started_with(tmp_path: Path, project_root: Path, **names: str) -> subprocess.CompletedProcess[str]:
    line = "from django.conf import settings; print(settings.EMAIL_BACKEND, settings.EMAIL_PORT)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMAIL_", "DEFAULT_FROM"))}
    given = {
        "DATABASE_URL": "",
        "REDIS_URL": "",
        "RUBATO_DATA": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "gateway.settings",
    }
    path = os.pathsep.join((str(project_root), str(project_root / "platform")))
    return subprocess.run(
        [sys.executable, "-c", line],
        env={**kept, **given, "PYTHONPATH": path, **names},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({}, "django.core.mail.backends.dummy.EmailBackend 25"),
        (ANY_MAIL, "django.core.mail.backends.smtp.EmailBackend 25"),
        ({**ANY_MAIL, "EMAIL_USE_TLS": "1"}, "django.core.mail.backends.smtp.EmailBackend 587"),
        ({**ANY_MAIL, "EMAIL_USE_SSL": "1"}, "django.core.mail.backends.smtp.EmailBackend 465"),
        ({**ANY_MAIL, "EMAIL_PORT": "2525"}, "django.core.mail.backends.smtp.EmailBackend 2525"),
    ],
    ids=["none", "plain", "starttls", "tls", "port"],
)
def test_mail_is_set_by_the_environment_and_is_written_nowhere_without_it(
    tmp_path: Path, project_root: Path, names: dict[str, str], told: str
) -> None:
    assert started_with(tmp_path, project_root, **names).stdout.strip() == told


def test_a_mail_server_without_an_address_to_send_from_is_refused_by_name(tmp_path: Path, project_root: Path) -> None:
    refused = started_with(tmp_path, project_root, EMAIL_HOST="smtp.example")
    assert "EMAIL_HOST is given, so DEFAULT_FROM_EMAIL must be too" in refused.stderr


@pytest.mark.parametrize(
    "formatter", [logs.LineFormatter("{message}", style="{"), logs.JsonLines()], ids=["line", "json"]
)
@pytest.mark.parametrize("link", ["/invitation/{}", "/account/password/reset/key/2-{}/"])
def test_a_link_that_opens_stands_in_no_line_of_the_log(formatter: logging.Formatter, link: str) -> None:
    secret = "c9x1d2-0f5e8a_77AbZ"
    record = logging.makeLogRecord({"msg": "Forbidden (%s): %s", "args": ("CSRF", link.format(secret))})
    line = formatter.format(record)
    assert secret not in line
    assert "…" in line or "\\u2026" in line


def test_every_name_that_settings_read_from_the_environment_is_in_the_table(project_root: Path) -> None:
    read = (project_root / "platform/gateway/settings.py").read_text()
    names = set(re.findall(r'(?:environ\.get|_flag)\(\s*"([A-Z_]+)"', read))
    table = (project_root / "docs/operations.md").read_text().partition("## Environment")[2].partition("\n## ")[0]
    told = {name for row in table.splitlines() for name in re.findall(r"`([A-Z_]+)`", row.split(" | ")[0])}
    assert len(names) > 20
    assert names - told == set()
