"""Somebody who has only the README: its Python runs as printed, both doors answer, an edit at the desk is obeyed."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI, RateLimitError

from tests.end_to_end.running_up import Up

EDIT_LIMIT_S = 1.0
CHAT: list[Any] = [{"role": "user", "content": "Hello"}]


class Form(HTMLParser):
    """What a browser would send back of a page's forms. Always: ``fields`` holds every control that has a value."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._select = ""
        self._is_chosen = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name, value = given.get("name") or "", given.get("value") or ""
        if tag == "select":
            self._select = name
        elif tag == "option" and "selected" in given:
            self._is_chosen = "value" not in given  # its text is its value
            self.fields[self._select] = value
        elif tag == "input" and name and (given.get("type") != "checkbox" or "checked" in given):
            self.fields[name] = value or ("on" if given.get("type") == "checkbox" else "")

    def handle_data(self, data: str) -> None:
        if self._is_chosen:
            self.fields[self._select], self._is_chosen = data, False


def test_a_newcomer_chats_and_edits_a_quota(up: Callable[..., Up], project_root: Path) -> None:
    """One start of the platform, one walk through what the README promises."""
    platform = up("--device-profile=toy")
    platform.wait_until_serving()
    _runs_the_readme(platform, project_root)
    with OpenAI(
        base_url=f"{platform.demo['base_url']}/v1", api_key=platform.demo["keys"]["nova"], max_retries=0
    ) as nova:
        _answers_at_both_doors(nova, platform.demo["model"])
        _obeys_the_desk(platform, nova)


def _runs_the_readme(platform: Up, project_root: Path) -> None:
    readme = (project_root / "README.md").read_text()
    found = re.search(r"^    import json\n(?:    .*\n|\n)+", readme, re.MULTILINE)
    assert found is not None
    program = textwrap.dedent(found[0])
    (platform.data.parent / ".rubato").symlink_to(platform.data)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=platform.data.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def _answers_at_both_doors(client: OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    plain = client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=5)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 5
    with client.responses.connect() as connection:
        connection.response.create(model=model, input="Hello", max_output_tokens=5)
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete", "error"):
                break
    assert kinds[0] == "response.created"
    assert kinds.count("response.output_text.delta") == 5


def _obeys_the_desk(platform: Up, client: OpenAI) -> None:
    with httpx2.Client(base_url=platform.demo["base_url"], follow_redirects=True) as browser:
        _log_in(browser, platform.demo["admin"])
        address = "/operator/policy/?q=nova"
        fields = Form(browser.get(address).text).fields
        (box,) = [name for name in fields if name.endswith(".default.requests_per_minute")]
        assert fields[box] == "60"
        edit = browser.post(address, data={**fields, box: "0"}, headers={"Referer": address})
        sent = {**Form(edit.text).fields, "action": "send", "reason": "they flood"}
        assert "In force: version" in browser.post(edit.url, data=sent, headers={"Referer": str(edit.url)}).text
    with pytest.raises(RateLimitError):
        _chat_until_refused(client, platform.demo["model"])


def _log_in(browser: httpx2.Client, login: dict[str, str]) -> None:
    door = browser.get("/admin/")
    named = {"login": login["username"], "password": login["password"]}
    page = browser.post(door.url, data={**Form(door.text).fields, **named})
    assert "Log out" in page.text


def _chat_until_refused(client: OpenAI, model: str) -> None:
    deadline = time.monotonic() + EDIT_LIMIT_S
    while time.monotonic() < deadline:
        client.chat.completions.create(model=model, messages=CHAT, max_completion_tokens=1)
        time.sleep(0.1)
