"""A saved policy reaches a gateway within a second, and a revoked key leaves its cache."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from gateway import policy_feed
from gateway.policy_feed import PolicyFeed, view_of
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, cpu_classes, snapshot_to_dict
from wire.redis_keys import Keys

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def document(version: int, *cells: TenantClassPolicy) -> dict[str, object]:
    snapshot = PolicySnapshot(version=version, classes=cpu_classes(), tenants=cells)
    price = {"model": "m", "priority_class": "default", "token_kind": "output", "micros_per_million": 7}
    zones = {"aurora": {"slug": "aurora", "name": "Aurora", "timezone": "Europe/Vienna"}}
    policy = snapshot_to_dict(snapshot)
    return {"version": version, "policy": policy, "price_version": 3, "prices": [price], "tenants": zones}


class Following:
    """A feed under test and what it told."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.redis = Redis.from_url(url, protocol=2)
        self.forgotten: list[str | None] = []
        self.feed = PolicyFeed(self.redis, keys, self.forgotten.append)

    async def version(self, expected: int) -> None:
        """Wait for it, at most the second that is promised."""
        await self.until(lambda: self.feed.view is not None and self.feed.view.version == expected)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(1.0):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)


async def no_policy() -> None:
    """The database has none either."""


@pytest.fixture
async def following(valkey: str, settings: object) -> AsyncIterator[Following]:
    prefix = f"feed:{uuid.uuid4().hex}:"
    settings.RUBATO_REDIS_PREFIX = prefix  # type: ignore[attr-defined]
    following = Following(valkey, Keys(prefix))
    yield following
    await following.feed.stop()
    await following.redis.aclose()


async def test_a_published_policy_is_in_memory_within_a_second(following: Following) -> None:  # P45
    await following.feed.start(no_policy)
    assert following.feed.view is None
    for version in (1, 2):
        await asyncio.to_thread(policy_feed.publish, document(version))
        await following.version(version)


async def test_a_feed_finds_the_policy_also_when_the_ping_was_lost(following: Following) -> None:
    await following.feed.start(no_policy)
    await asyncio.sleep(0)
    await following.redis.set(f"{policy_feed.settings.RUBATO_REDIS_PREFIX}policy:current", json.dumps(document(4)))
    await following.version(4)


async def test_an_empty_redis_is_filled_from_the_database_at_the_start(following: Following) -> None:
    async def publish() -> None:
        await asyncio.to_thread(policy_feed.publish, document(9))

    await following.feed.start(publish)
    assert following.feed.view is not None
    assert following.feed.view.version == 9


async def test_an_older_policy_never_replaces_a_newer_one_and_that_is_told(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(policy_feed.publish, document(2))
    await asyncio.to_thread(policy_feed.publish, document(1))
    await following.feed.start(no_policy)
    assert following.feed.view is not None
    assert following.feed.view.version == 2
    assert "policy 1 is not put in force" in caplog.text


async def test_a_broken_document_is_ignored_and_the_last_good_one_stays(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(policy_feed.publish, document(1))
    await following.feed.start(no_policy)
    for broken in ("{", "[]", '{"policy": 5}', '{"policy": {}}'):
        await following.redis.set(f"{policy_feed.settings.RUBATO_REDIS_PREFIX}policy:current", broken)
        await following.feed.refresh()
        await following.feed.refresh()
    assert following.feed.view is not None
    assert following.feed.view.version == 1
    assert len(caplog.records) == 4


async def test_a_revoked_key_is_forgotten_within_a_second(following: Following) -> None:
    await following.feed.start(no_policy)
    await following.until(lambda: None in following.forgotten)  # the feed listens
    await asyncio.to_thread(policy_feed.revoked, "AAAAbbbbCCCC")
    await following.until(lambda: "AAAAbbbbCCCC" in following.forgotten)


def test_a_view_answers_quotas_prices_and_zones() -> None:
    cells = (
        TenantClassPolicy(tenant_id="aurora", priority_class=DEFAULT, concurrency=2),
        TenantClassPolicy(tenant_id="aurora", priority_class=BATCH, allowed=False),
    )
    view = view_of(document(5, *cells))
    assert (view.version, view.price_version) == (5, 3)
    assert view.quota("aurora", DEFAULT) == cells[0]
    assert view.quota("aurora", BATCH) is None
    assert view.quota("aurora", INTERACTIVE) is None
    assert view.quota("stranger", DEFAULT) is None
    assert view.prices["m", DEFAULT].output == 7
    assert str(view.zone("aurora")) == "Europe/Vienna"
    assert str(view.zone("nobody")) == "UTC"
