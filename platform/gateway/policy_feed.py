"""The policy in force, in memory: written to Redis by whoever saves it, followed by every gateway within a second.

Knows the published document; refuses to know how a policy is edited or enforced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import TimeoutError as RedisTimeoutError

from billing.pricing import TokenPrices
from gateway.background import Repeated
from scheduler_engine.policy import (
    PolicySnapshot,
    PriorityClass,
    TenantClassPolicy,
    snapshot_from_dict,
)
from wire.redis_bus import bus_errors, connect, write_policy
from wire.redis_keys import POLICY_POLL_S, Keys

log = logging.getLogger(__name__)
_UTC = ZoneInfo("UTC")
MAX_AGE_S = 1.0  # of a view that is decided by, and of the silence after a ping
TELL_S = 2.0  # of one try, of two: an edit that was saved waits no longer, and is told again until it is
LISTEN_S = 8.0  # of one round: a connection, a subscription, a poll and a ping


def publish(document: Mapping[str, Any]) -> None:
    """Called on commit of a policy edit. Raises BusError: the edit is saved, and the next publish carries it."""
    keys, version = Keys(settings.RUBATO_REDIS_PREFIX), document["version"]
    with connect(settings.REDIS_URL, timeout_s=TELL_S) as client:
        if not write_policy(client, keys, version=version, document=json.dumps(document)):
            log.error("policy %s is not put in force: Redis holds a newer one (%s)", version, keys.policy_version)


def revoked(public_id: str) -> None:
    """Called on commit when a key was revoked or its tenant switched: every gateway drops it from its cache."""
    with connect(settings.REDIS_URL, timeout_s=TELL_S) as client:
        client.publish(keys_changed(Keys(settings.RUBATO_REDIS_PREFIX)), public_id)


def keys_changed(keys: Keys) -> str:
    """The channel on which public ids of changed keys are told."""
    return f"{keys.prefix}keys:changed"


@dataclass(frozen=True, slots=True)
class PolicyView:
    """A policy as the door asks it. Always: one version, never mixed with another."""

    snapshot: PolicySnapshot
    price_version: int
    quotas: Mapping[tuple[str, PriorityClass], TenantClassPolicy] = field(default_factory=dict)
    prices: Mapping[tuple[str, PriorityClass], TokenPrices] = field(default_factory=dict)
    zones: Mapping[str, ZoneInfo] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.snapshot.version

    def quota(self, tenant_id: str, priority_class: PriorityClass) -> TenantClassPolicy | None:
        """None where the class is paused or not granted."""
        quota = self.quotas.get((tenant_id, priority_class))
        return quota if quota is not None and quota.allowed else None

    def classes_of(self, tenant_id: str) -> list[PriorityClass]:
        """Those in which the policy says anything of the tenant, also that they are paused."""
        return [each for each in PriorityClass if (tenant_id, each) in self.quotas]

    def zone(self, tenant_id: str) -> ZoneInfo:
        return self.zones.get(tenant_id, _UTC)


def view_of(document: Mapping[str, Any]) -> PolicyView:
    """Raises PolicyError, KeyError, TypeError or ValueError for a document that is none of ours."""
    snapshot = snapshot_from_dict(document["policy"])
    prices: dict[tuple[str, PriorityClass], dict[str, int]] = {}
    for row in document.get("prices", ()):
        where = (row["model"], PriorityClass.from_label(row["priority_class"]))
        prices.setdefault(where, {"prompt": 0, "cached": 0, "output": 0})[row["token_kind"]] = row["micros_per_million"]
    return PolicyView(
        snapshot=snapshot,
        price_version=document.get("price_version", 0),
        quotas={(quota.tenant_id, quota.priority_class): quota for quota in snapshot.tenants},
        prices={where: TokenPrices(**row) for where, row in prices.items()},
        zones={tenant_id: ZoneInfo(tenant["timezone"]) for tenant_id, tenant in document.get("tenants", {}).items()},
    )


class PolicyFeed:
    """Polled, and pushed too. Always: ``view`` is the newest document that could be read; after a broken one the last
    good one stays. Who decides by it calls ``confirm`` first, so that no view is used on that nobody renews.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        on_key_changed: Callable[[str | None], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._on_key_changed = on_key_changed
        self._clock_s = clock_s
        self._raw: bytes | None = None
        self._view: PolicyView | None = None
        self._confirmed_at_s = self._heard_at_s = -math.inf
        self._pubsub: PubSub | None = None
        self._is_cut_off = False
        self._work = (
            Repeated(self.refresh, POLICY_POLL_S, name="policy feed"),
            Repeated(self._listen, 0.0, name="news of keys", again_s=POLICY_POLL_S, round_s=LISTEN_S),
        )

    @property
    def view(self) -> PolicyView | None:
        """None until a policy has been published."""
        return self._view

    @property
    def age_s(self) -> float:
        """Since ``view`` was last seen to be what is in force."""
        return self._clock_s() - self._confirmed_at_s

    @property
    def silent_s(self) -> float:
        """Since a push could last have come."""
        return self._clock_s() - self._heard_at_s

    @property
    def is_listening(self) -> bool:
        """Whether a push would have come by now."""
        return not self._is_cut_off and self.silent_s <= POLICY_POLL_S + MAX_AGE_S

    async def start(self, republish: Callable[[], Awaitable[None]]) -> None:
        """Read the policy once (``republish`` is asked for it when Redis has none), then follow it."""
        await self.refresh()
        if self._view is None:
            await republish()
            await self.refresh()
        for work in self._work:
            work.start()

    async def stop(self) -> None:
        for work in self._work:
            await work.stop()
        await self._hang_up()

    async def refresh(self) -> None:
        """Raises RedisError."""
        now_s = self._clock_s()
        raw = await self._redis.get(self._keys.policy_current)
        self._confirmed_at_s = now_s
        if not isinstance(raw, bytes) or raw == self._raw:
            return
        self._raw = raw
        try:
            self._view = view_of(json.loads(raw))
        except Exception as error:
            log.error("a published policy cannot be read and is ignored: %s", error)

    async def catch_up(self) -> bool:
        """True when a newer policy than the one in view had been put in force; it is in view now. Raises BusError."""
        before, now_s = self._view, self._clock_s()
        with bus_errors():
            held = await self._redis.get(self._keys.policy_version)
            if before is not None and (held is None or int(held) <= before.version):
                self._confirmed_at_s = now_s
                return False
            await self.refresh()
        return self._view is not before

    async def confirm(self) -> None:
        """``view`` is in force, or was MAX_AGE_S ago. Raises BusError where nobody can say."""
        if self.age_s > MAX_AGE_S:
            await self.catch_up()

    async def _listen(self) -> None:
        """One message, or the proof that one could come: a quiet connection and a dead one look alike. Raises
        RedisError.
        """
        try:
            pubsub = self._pubsub = self._pubsub or self._redis.pubsub()
            if not pubsub.subscribed:
                await pubsub.subscribe(self._keys.policy_changed, keys_changed(self._keys))
            message = await pubsub.get_message(timeout=POLICY_POLL_S)
            if message is None:
                await pubsub.ping()
                message = await pubsub.get_message(timeout=MAX_AGE_S)
            if message is None:
                raise RedisTimeoutError("no answer to a ping")
            await self._hear(message)
            self._heard_at_s, self._is_cut_off = self._clock_s(), False
        except BaseException:
            self._is_cut_off = True
            await self._hang_up()
            raise

    async def _hear(self, message: Mapping[str, Any]) -> None:
        """Who has just been subscribed, perhaps anew by the library itself, may have missed any push before."""
        match message["type"], message["channel"]:
            case "subscribe", _:
                self._on_key_changed(None)
            case "message", channel if channel.decode() == keys_changed(self._keys):
                self._on_key_changed(message["data"].decode())
            case "message", _:
                await self.refresh()

    async def _hang_up(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            with suppress(Exception):
                async with asyncio.timeout(MAX_AGE_S):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # the library brings no type here
