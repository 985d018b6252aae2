"""What the desk says of an edit that is saved and not yet told to gateways and workers: not that it is in force."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import Client

from gateway import policy_feed
from gateway.desk import telling
from tenants import services
from tenants.models import PolicyVersion
from tests.gateway.desk_world import act, drafted, open_house, weight
from wire.redis_bus.connection import SOCKET_TIMEOUT_S
from wire.redis_keys import Keys

NOWHERE = "redis://127.0.0.1:1/0"
HTMX = {"HX-Request": "true"}
FRAGMENT = "/operator/policy/told"


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def words(page: str) -> str:
    """What is read at the top of a page about the newest version."""
    (found,) = re.findall(r'<div id="telling"[^>]*>(.*?)</div>', page, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", "", found).split())


def seen(client: Client, page: str = "/operator/policy/history") -> str:
    return words(client.get(page).content.decode())


def held(version: int) -> None:
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.set(Keys(settings.RUBATO_REDIS_PREFIX).policy_version, version)


def test_an_edit_that_is_saved_while_redis_is_away_is_not_said_to_be_in_force(house: Any, settings: Any) -> None:
    there, settings.REDIS_URL = settings.REDIS_URL, NOWHERE
    proposal = drafted(house.alice, default__weight="7")
    assert (
        "The replay failed: Redis does not answer"
        in house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    )
    page = act(house.alice, proposal, action="send")
    saved = PolicyVersion.objects.latest("version").version
    assert weight() == 7
    assert "In force" not in page
    assert f"Saved: version {saved}." in page
    assert f"Version {saved} is saved and not in force. Redis does not answer" in words(page)
    assert re.search(r"Saved \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, \d+ s ago\.", words(page))
    settings.REDIS_URL = there
    assert f"Version {saved} is saved and not in force. Gateways and workers go by version {saved - 1}" in seen(
        house.alice
    )
    services.publish_policy()
    assert seen(house.alice) == ""


@pytest.mark.parametrize("page", ["", "classes", "history", "versions/1"])
def test_every_page_of_the_desk_says_what_is_not_told(house: Any, settings: Any, page: str) -> None:
    settings.REDIS_URL = NOWHERE
    assert seen(house.alice, f"/operator/policy/{page}").startswith("Version 1 is saved and not in force.")


def test_the_badge_of_a_version_follows_what_gateways_and_workers_go_by(house: Any) -> None:
    badge = re.compile(r'<span class="role"([^>]*)>([^<]*)</span>')
    for page in ("history?all=1", "versions/1"):
        held(0)
        ((asks, said),) = badge.findall(house.alice.get(f"/operator/policy/{page}").content.decode())
        (place,) = re.findall(r'hx-get="([^"]+)"', asks)
        assert said == "saved"
        assert badge.findall(house.alice.get(place, headers=HTMX).content.decode()) == [(asks, "saved")]
        held(1)
        assert badge.findall(house.alice.get(place, headers=HTMX).content.decode()) == [("", "in force")]


def test_what_is_told_at_last_is_said_and_asked_for_no_more(house: Any) -> None:
    held(0)
    assert "hx-get" in house.alice.get(FRAGMENT, headers=HTMX).content.decode()
    held(1)
    fragment = house.alice.get(FRAGMENT, headers=HTMX).content.decode()
    assert words(fragment) == "In force: version 1."
    assert "hx-get" not in fragment


def test_a_newer_version_in_redis_than_is_saved_is_said_to_rule(house: Any) -> None:
    held(20)
    assert "Gateways and workers go by version 20, which is none of this database." in seen(house.alice)


@pytest.mark.parametrize("headers", [{}, HTMX], ids=["page", "fragment"])
def test_an_emergency_pause_that_is_not_told_says_what_stays_true_and_leaves_the_rest_to_what_changes(
    house: Any, settings: Any, headers: dict[str, str]
) -> None:
    settings.REDIS_URL = NOWHERE
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    page = house.alice.post(place, {"action": "pause"}, headers=headers, follow=True).content.decode()
    (said,) = re.findall(r'<p class="notice *">(Aurora[^<]*)</p>', page)
    assert said == "Aurora, default: paused. Saved as version 2."
    assert words(page).startswith("Version 2 is saved and not in force.")
    assert page.count("not in force") == 1


def test_the_fragment_by_itself_leads_to_the_history(house: Any) -> None:
    assert house.alice.get(FRAGMENT)["Location"] == "/operator/policy/history"


def test_a_redis_that_is_silent_keeps_a_pause_waiting_no_longer_than_its_button_does(
    house: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 2  # of each: the library's own, and one more
    page = house.alice.get("/operator/policy/").content.decode()
    (button_ms,) = set(re.findall(r'"timeout": (\d+)', page))
    assert 1_000 * tries * (policy_feed.TELL_S + telling.PATIENCE_S) < int(button_ms)
    monkeypatch.setattr(policy_feed, "TELL_S", 0.01)
    monkeypatch.setattr(telling, "PATIENCE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.REDIS_URL = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        began = time.monotonic()
        answer = house.alice.post(
            f"/operator/policy/pause/{house.tenant.id}/default", {"action": "pause"}, headers=HTMX
        )
        assert time.monotonic() - began < SOCKET_TIMEOUT_S  # what one try of anything else would have waited
    assert "Aurora, default: paused. Saved as version 2." in answer.content.decode()
