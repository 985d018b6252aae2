"""Promises of the periodic tasks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, available_timezones

import pytest
import redis
from django.conf import settings

from billing.statements import GRACE
from gateway.celery import app
from gateway.tasks import publish_policy_if_stale
from wire.redis_keys import Keys

pytestmark = pytest.mark.django_db


@pytest.fixture
def policy_in_redis(valkey: str) -> dict[str, object]:
    publish_policy_if_stale()
    return _held(valkey)


def _held(url: str) -> dict[str, object]:
    with redis.Redis.from_url(url) as client:
        found: dict[str, object] = json.loads(client.get(Keys(settings.RUBATO_REDIS_PREFIX).policy_current))
        return found


def test_an_empty_redis_gets_the_policy_of_the_database(policy_in_redis: dict[str, object]) -> None:
    assert {"version", "policy", "prices", "tenants"} <= policy_in_redis.keys()


def test_a_policy_that_is_in_force_is_left_alone(policy_in_redis: dict[str, object]) -> None:
    assert publish_policy_if_stale() is False


def test_a_policy_from_an_old_backup_is_replaced(policy_in_redis: dict[str, object], valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set(Keys(settings.RUBATO_REDIS_PREFIX).policy_current, json.dumps({"version": 99}))
    assert publish_policy_if_stale() is True
    assert _held(valkey_url) == policy_in_redis


def test_everything_that_beat_plans_is_a_task_that_exists() -> None:
    app.loader.import_default_modules()
    assert {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()} <= set(app.tasks)


def test_beat_asks_for_statements_just_when_a_day_of_any_zone_may_be_closed() -> None:
    midnights = [datetime(2026, 12, 1, tzinfo=ZoneInfo(zone)) for zone in available_timezones()]
    closing = {(midnight.astimezone(UTC) + GRACE).minute for midnight in midnights}
    assert closing <= app.conf.beat_schedule["statements"]["schedule"].minute
