"""Calls of the management API that nobody would write: refused in the error's shape, or served, and never a failure.

FUZZ_S sets how long the soaked half goes on (two minutes).
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import pytest

from billing import services as billing_services
from tests.gateway.management_world import PRICES, ROUTES, House, as_owner, error

SECONDS = float(os.environ.get("FUZZ_S", 120))
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**70, 1e308, "", "\0", "\ud800", "x" * 2_000, "owner", "batch", [], {}, [None]),
    *("2020-01-01T00:00:00Z", "9999-12-31T23:59:59+14:00", "0001-01-01T00:00:00-23:59", "a@b.example", {"a": []}),
)
FIELDS = ("name", "default_class", "expires_at", "role", "grace_seconds", "email", "colour")
NAMES = ("start_time", "end_time", "limit", "after", "page", "bucket_width", "group_by", "format", "project_ids")
VALUES = ("0", "-1", "9" * 11, "9" * 40, "1m", "csv", "page_1", "page_99999999999", "%00", "%ff", "é", "x" * 900)
ENDS_IT = (("DELETE", "api_keys/{key}"), ("DELETE", "users/{member}"))


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return House("aurora", billing_services.set_prices(actor="tests", prices=PRICES).version)


def fuzz(house: House, chance: random.Random) -> None:
    """One call. A failure of ours is raised here by Django's test client."""
    method, route, _ = chance.choice([one for one in ROUTES if one[:2] not in ENDS_IT])
    query = "&".join(f"{chance.choice(NAMES)}={chance.choice(VALUES)}" for _ in range(chance.randint(0, 3)))
    body = {chance.choice(FIELDS): chance.choice(ODD) for _ in range(chance.randint(0, 3))}
    path = route.split("?")[0].format(**house.ids()) + (f"?{query}" if query else "")
    content = json.dumps(body).encode() if chance.random() < 0.9 else chance.randbytes(20)
    answer = as_owner(house, method, path, content if method == "POST" else None)
    if answer.status_code >= 400:
        assert error(answer)["message"], (method, path, body)


def test_spoiled_calls_are_refused_or_served_and_never_fail(house: House) -> None:
    chance = random.Random(7)
    for _ in range(60):
        fuzz(house, chance)


@pytest.mark.soak
def test_the_management_api_is_fuzzed_for_as_long_as_one_likes(house: House) -> None:
    chance, ends_at_s = random.Random(8), time.monotonic() + SECONDS
    while time.monotonic() < ends_at_s:
        fuzz(house, chance)
