"""Parts of pages that htmx asks for, and the files of others that the pages bring along."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from gateway import console
from tests.gateway.desk_world import drafted, open_house

FOLDER = Path(console.__file__).parent
FILES = tomllib.loads((FOLDER / "vendored.toml").read_text())["file"]
ASKED_BY_HTMX = {"HX-Request": "true"}


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


@pytest.mark.parametrize("file", FILES, ids=[file["to"] for file in FILES])
def test_a_file_of_others_is_as_it_came(file: dict[str, str]) -> None:
    assert hashlib.sha256((FOLDER / "static" / file["to"]).read_bytes()).hexdigest() == file["sha256"]


def test_every_file_of_others_is_listed_with_its_licence() -> None:
    assert {f"vendor/{one.name}" for one in (FOLDER / "static" / "vendor").iterdir()} == {one["to"] for one in FILES}
    assert all(one["version"] and one["licence"] for one in FILES)


def test_a_fragment_behind_the_log_in_sends_the_browser_there() -> None:
    answer = Client().get("/console/aurora/live", headers=ASKED_BY_HTMX)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer["HX-Redirect"] == "/account/login/?next=/console/aurora/live"
    assert not answer.has_header("Location")


def test_a_page_behind_the_log_in_is_led_there_as_ever_and_no_cache_takes_one_for_the_other() -> None:
    answer = Client().get("/console/aurora/live")
    assert answer.status_code == 302
    assert "HX-Request" in answer["Vary"]


def test_a_preview_is_a_fragment_for_htmx_and_leads_anybody_else_to_its_edit(house: Any) -> None:
    proposal = drafted(house.alice, default__weight="7")
    address = f"/operator/policy/edits/{proposal.id}/preview"
    fragment = house.alice.get(address, headers=ASKED_BY_HTMX).content.decode()
    assert 'id="preview"' in fragment
    assert "<html" not in fragment
    assert house.alice.get(address)["Location"] == f"/operator/policy/edits/{proposal.id}"
