"""Whatever befalls a gateway's way to Redis, an edit of the policy and a revoked key are in force soon afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from redis import exceptions
from redis.asyncio.client import PubSub

from gateway import background, policy_feed
from gateway.policy_feed import MAX_AGE_S, PolicyFeed
from tests.gateway.middleman import Middleman, middleman
from tests.gateway.test_background import ERRORS
from tests.gateway.test_policy_feed import document
from wire.redis_bus import connect_async, line
from wire.redis_bus.line import LineRedis
from wire.redis_keys import Keys

SOON_S = 3.0  # the promised second, and what it takes to find out that nobody answers


class Followed:
    """A feed behind a middleman. ``in_force`` holds what both promises say of it."""

    def __init__(self, feed: PolicyFeed, told: list[str | None], way: Middleman) -> None:
        self.feed, self.told, self.way = feed, told, way
        self._version = 0

    async def edit(self) -> None:
        self._version += 1
        await asyncio.to_thread(policy_feed.publish, document(self._version))

    @property
    def is_up_to_date(self) -> bool:
        return self.feed.view is not None and self.feed.view.version == self._version

    async def hears(self) -> None:
        """An edit is in view, and a revoked key forgotten."""
        await self.edit()
        self.told.clear()
        await asyncio.to_thread(policy_feed.revoked, "AAAAbbbbCCCC")
        await self.until(lambda: self.is_up_to_date and bool({"AAAAbbbbCCCC", None} & set(self.told)))

    async def until(self, condition: Callable[[], bool], seconds: float = SOON_S) -> None:
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(url: str) -> AsyncIterator[Followed]:
    told: list[str | None] = []
    async with middleman(url) as way, connect_async(way.url) as redis:
        feed = PolicyFeed(redis, Keys(policy_feed.settings.RUBATO_REDIS_PREFIX), told.append)
        found = Followed(feed, told, way)
        await found.edit()
        await feed.start(_nothing)
        try:
            await found.until(lambda: None in told)
            yield found
        finally:
            await feed.stop()


async def _nothing() -> None:
    """There is a policy."""


async def _lost(*_: object, **__: object) -> Any:
    """So that it subscribes anew."""
    raise exceptions.ConnectionError("lost")


@pytest.fixture
def url(valkey: str, settings: Any) -> str:
    settings.RUBATO_REDIS_PREFIX = f"feed:{uuid.uuid4().hex}:"
    return valkey


WAITS: dict[str, tuple[type, str]] = {
    "while it listens": (PubSub, "get_message"),
    "while it subscribes": (PubSub, "subscribe"),
    "while it asks who is there": (PubSub, "ping"),
    "while it reads": (LineRedis, "execute_command"),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
async def test_no_error_ends_the_feed(
    url: str, wait: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_feed, "POLICY_POLL_S", 0.05)
    async with followed(url) as following:
        met = asyncio.Event()

        async def fail(*_: object, **__: object) -> Any:
            met.set()
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(*WAITS[wait], fail)
            if wait == "while it subscribes":
                broken.setattr(PubSub, "get_message", _lost)
            async with asyncio.timeout(2 * SOON_S):
                await met.wait()
        await following.hears()


@pytest.mark.parametrize("wait", WAITS)
async def test_no_wait_without_an_end_holds_the_feed_up(url: str, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_feed, "LISTEN_S", 0.2)
    monkeypatch.setattr(policy_feed, "POLICY_POLL_S", 0.05)
    monkeypatch.setattr(background, "ROUND_S", 0.2)
    async with followed(url) as following:
        met = asyncio.Event()

        async def hang(*_: object, **__: object) -> Any:
            met.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as broken:
            broken.setattr(*WAITS[wait], hang)
            if wait == "while it subscribes":
                broken.setattr(PubSub, "get_message", _lost)
            async with asyncio.timeout(SOON_S):
                await met.wait()
        await following.hears()


async def test_a_connection_that_falls_silent_is_found_out_and_replaced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a process was stopped for minutes: nothing comes, nothing is refused, and no error is raised."""
    monkeypatch.setattr(line, "ANSWER_S", 0.5)
    async with followed(url) as following:
        following.way.fall_silent()
        await following.hears()


async def test_a_lost_connection_is_known_at_once_to_bring_no_push(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with followed(url) as following:
        feed = following.feed
        monkeypatch.setattr(feed, "_clock_s", lambda: feed._heard_at_s)  # it is not the silence that tells
        await following.until(lambda: feed.is_listening)
        with monkeypatch.context() as broken:
            broken.setattr(PubSub, "get_message", _lost)
            await following.until(lambda: not feed.is_listening)
        await following.until(lambda: feed.is_listening)


async def test_resets_at_any_moment_of_a_connection_are_survived(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    monkeypatch.setattr(policy_feed, "POLICY_POLL_S", 0.01)
    async with followed(url) as following:
        following.way.num_resets_left = 60
        following.way.reset()
        await following.until(lambda: following.way.num_resets_left == 0, 30.0)
        await following.hears()


def test_resets_are_survived_in_the_event_loop_that_the_processes_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop says RuntimeError to who writes on a connection that was reset."""
    uvloop.run(test_resets_at_any_moment_of_a_connection_are_survived(url, monkeypatch))


async def test_a_push_lost_while_the_library_reconnected_by_itself_is_made_up_for(url: str) -> None:
    async with followed(url) as following:
        following.told.clear()
        pubsub = following.feed._pubsub
        assert pubsub is not None
        await pubsub.connection.disconnect(nowait=True)
        await following.until(lambda: None in following.told)


async def test_who_decides_by_a_view_that_nobody_renews_reads_it_anew(url: str) -> None:
    now_s = [0.0]
    async with connect_async(url) as redis:
        feed = PolicyFeed(redis, Keys(policy_feed.settings.RUBATO_REDIS_PREFIX), lambda _: None, lambda: now_s[0])
        await feed.refresh()
        await asyncio.to_thread(policy_feed.publish, document(1))
        now_s[0] = MAX_AGE_S
        await feed.confirm()
        assert (feed.view, feed.age_s) == (None, MAX_AGE_S)
        now_s[0] += 0.001
        await feed.confirm()
        assert feed.view is not None
        assert (feed.view.version, feed.age_s) == (1, 0.0)
