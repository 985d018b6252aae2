"""May this request come in: every limit of the tenant, for all its responses, in one atomic step, all taken or nothing.

Knows quotas, prices and their keys in Redis (``limits.lua``); refuses to know how the work is done. Nobody is
let in while Redis is down, or has lost what it held and is not rebuilt yet (``rebuild.py``).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from billing.pricing import TokenPrices, worst_case_micros
from gateway.errors import Reason, Refusal
from gateway.money_windows import local_moment, window_id, window_span
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire import codec
from wire.messages import Reserved
from wire.redis_bus import Unreachable, bus_errors
from wire.redis_keys import Keys

LEASE_MS = 15_000
RECORD_LIFETIME_S = 86_400
MAX_USAGE_ENTRIES = 100_000
MAX_RENEWED = 500  # by one call of the script: others wait for it
_SCRIPT = Path(__file__).with_name("limits.lua").read_text(encoding="utf-8")
_RENEW = Path(__file__).with_name("renew.lua").read_text(encoding="utf-8")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a response would take at worst, in one class. ``max_tokens`` counts all choices together.

    ``may_wait``: over the tenant's concurrency it is let in all the same, to wait in the engine for its turn.
    """

    response_id: str
    gateway_id: str
    worker_id: str
    tenant_id: str
    project_id: str
    key_id: str
    priority_class: PriorityClass
    model: str
    source: str
    prompt_tokens: int
    max_tokens: int
    quota: TenantClassPolicy
    prices: TokenPrices
    zone: ZoneInfo
    policy_version: int
    price_version: int
    may_wait: bool = False
    epoch: int = 0  # of the worker
    is_kept: bool = False  # a card will lie beside its record
    requested_class: PriorityClass | None = None  # where it is another one that the policy lets this one serve for

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def money_micros(self) -> int:
        return worst_case_micros(
            prompt_tokens=self.prompt_tokens, max_output_tokens=self.max_tokens, prices=self.prices
        )


@dataclass(frozen=True, slots=True)
class BucketLevel:
    """One per-minute limit as it stands after this request."""

    limit: int
    remaining: int

    @property
    def reset_ms(self) -> int:
        """Until it is full again."""
        return -(-(self.limit - self.remaining) * 60_000 // self.limit) if self.limit else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the x-ratelimit headers say; None = no limit."""

    priority_class: PriorityClass
    requests: BucketLevel | None = None
    tokens: BucketLevel | None = None

    def headers(self) -> dict[str, str]:
        headers = {"x-ratelimit-class": self.priority_class.label}
        for name, level in (("requests", self.requests), ("tokens", self.tokens)):
            if level is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(level.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(level.remaining)
                headers[f"x-ratelimit-reset-{name}"] = duration_text(level.reset_ms)
        return headers


@dataclass(frozen=True, slots=True)
class Grant:
    """The response is in. Always: its lease is renewed until the end, which comes exactly once, on the Bus."""

    response_id: str
    tenant_id: str
    lease_key: str
    limits: Limits


class Standing(Enum):
    """What the record of a response says to a gateway that serves it."""

    OURS = 0
    ANOTHERS = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Denied:
    """``is_unsure``: what Redis did was not heard; the response may stand there all the same."""

    refusal: Refusal
    limits: Limits
    is_unsure: bool = False


def duration_text(milliseconds: int) -> str:
    """As the rate-limit headers write it: ``12ms``, ``1s``, ``6m0s``."""
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    seconds = -(-milliseconds // 1_000)
    return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m{seconds % 60}s"


def never_within_limit(bundle: Sequence[Wish]) -> Refusal | None:
    """What its limit can never hold, however long one waits."""
    first = bundle[0]
    quota, at_once = first.quota, 1 if first.may_wait else len(bundle)
    limits = (
        ("requests per minute", quota.requests_per_minute, len(bundle)),
        ("tokens per minute", quota.tokens_per_minute, _tokens(bundle)),
        ("requests at once", quota.concurrency, at_once),
    )
    for name, limit, need in limits:
        if limit is not None and need > limit:
            message = f"This request needs {need} of {limit} {name} allowed in class {first.priority_class.label}."
            return Refusal(reason=Reason.NEVER_WITHIN_LIMIT, message=message)
    return None


def new_response_id(now_ms: int, entropy: bytes) -> str:
    """UUIDv7 (RFC 9562): 48 bits of milliseconds, then 74 random bits of the ten bytes given."""
    random = int.from_bytes(entropy[:10], "big")
    value = (now_ms & (1 << 48) - 1) << 80 | random & (1 << 80) - 1
    value = value & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=value & ~(0x3 << 62) | 0x2 << 62))


class Admission:
    """Always: an admitted wish took every limit and stands in the usage stream; a denied one took nothing."""

    def __init__(self, redis: Redis, keys: Keys, clock_ms: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._script = redis.register_script(_SCRIPT)
        self._renew = redis.register_script(_RENEW)
        self._clock_ms = clock_ms
        self._offset_ms = 0  # Redis' clock minus ours, from its last answer

    def now_ms(self) -> int:
        """Redis' clock, or the one handed in."""
        return self._clock_ms() if self._clock_ms else time.time_ns() // 1_000_000 + self._offset_ms

    async def admit(self, *bundles: Sequence[Wish]) -> list[Grant] | Denied:
        """All responses of one request, by the first bundle that every limit holds; else the refusal of the first.

        A bundle has a wish for each of the responses, in their order, all in one class: one bundle a class.
        """
        nothing_known = Limits(bundles[0][0].priority_class)
        never = [never_within_limit(bundle) for bundle in bundles]
        possible = [bundle for bundle, refusal in zip(bundles, never, strict=True) if refusal is None]
        if not possible:
            assert never[0] is not None
            return Denied(never[0], nothing_known)
        windows = [window_id(bundle[0].quota, bundle[0].zone, self.now_ms()) for bundle in possible]
        asked = [self._bundle(bundle, window) for bundle, window in zip(possible, windows, strict=True)]
        reserved = [_reserved(wish, w) for bundle, w in zip(possible, windows, strict=True) for wish in bundle]
        try:
            reply = await self._script(args=[_encode(asked), *reserved])
        except RedisError as error:
            message = f"Limits cannot be checked now ({type(error).__name__})."
            refusal = Refusal(reason=Reason.UNAVAILABLE, message=message)
            return Denied(refusal, nothing_known, is_unsure=not isinstance(error, Unreachable))
        kind, redis_ms = reply[0].decode(), int(reply[1])
        if self._clock_ms is None:
            self._offset_ms = redis_ms - time.time_ns() // 1_000_000
        if kind == "admitted":
            admitted = possible[int(reply[2]) - 1]
            lease_key, limits = self._lease_key(admitted[0]), _limits(admitted[0], reply[3:])
            return [Grant(wish.response_id, wish.tenant_id, lease_key, limits) for wish in admitted]
        # A duplicate is our own call, sent once more because its answer was lost, or another's try at the same line.
        first = possible[0]
        refusal, limits = _refusal(kind, int(reply[2]), first, redis_ms), _limits(first[0], reply[3:])
        return Denied(refusal, limits, is_unsure=kind == "duplicate")

    async def renew(self, gateway_id: str, grants: Sequence[Grant]) -> list[Standing]:
        """Keep the leases of responses that this gateway serves; one without a ``lease_key`` holds none. Whose each is,
        in their order: a gateway that slept past its heartbeat learns here what others have taken. Raises BusError.
        """
        expires_at_ms = self.now_ms() + LEASE_MS
        found: list[Standing] = []
        for start in range(0, len(grants), MAX_RENEWED):
            some = grants[start : start + MAX_RENEWED]
            keys = [key for grant in some for key in (self._keys.response(grant.response_id), grant.lease_key)]
            arguments: list[str | int] = [gateway_id, expires_at_ms, *(grant.response_id for grant in some)]
            with bus_errors():
                found += map(Standing, await self._renew(keys=keys, args=arguments))
        return found

    def _card(self, wish: Wish) -> dict[str, str]:
        return {"card": self._keys.card(wish.tenant_id, wish.response_id)} if wish.is_kept else {}

    def _lease_key(self, wish: Wish) -> str:
        return self._keys.lease(wish.tenant_id, wish.priority_class.label)

    def _bundle(self, bundle: Sequence[Wish], window: str) -> dict[str, Any]:
        """One of the script's first argument."""
        first = bundle[0]
        tenant_id, label = first.tenant_id, first.priority_class.label
        # Who waits holds a lease too: nobody who would not wait passes by.
        concurrency = None if first.may_wait else first.quota.concurrency
        lease_key, money_key = self._lease_key(first), self._keys.money(tenant_id, label, window)
        money_micros = sum(wish.money_micros for wish in bundle)
        return {
            "now_ms": self._clock_ms() if self._clock_ms else 0,
            "built": self._keys.gate_built,
            "usage": self._keys.usage,
            "usage_limit": MAX_USAGE_ENTRIES,
            "record_s": RECORD_LIFETIME_S,
            "lease_ms": LEASE_MS,
            "buckets": self._buckets(bundle),
            "leases": [{"key": lease_key, "limit": _or_unlimited(concurrency)}],
            "money": [{"key": money_key, "cap": _or_unlimited(first.quota.money_micros), "amount": money_micros}],
            "responses": [self._response(wish, lease_key, money_key) for wish in bundle],
        }

    def _buckets(self, bundle: Sequence[Wish]) -> list[dict[str, Any]]:
        tenant_id, label = bundle[0].tenant_id, bundle[0].priority_class.label
        return [
            {"key": self._keys.bucket(tenant_id, label, kind), "kind": kind, "limit": limit, "amount": amount}
            for kind, limit, amount in _per_minute(bundle)
        ]

    def _response(self, wish: Wish, lease_key: str, money_key: str) -> dict[str, Any]:
        fields = _record(wish, self._buckets([wish]), lease_key, money_key) | self._card(wish)
        return {"id": wish.response_id, "record": self._keys.response(wish.response_id), "fields": fields}


def _tokens(bundle: Sequence[Wish]) -> int:
    return sum(wish.tokens for wish in bundle)


def _per_minute(bundle: Sequence[Wish]) -> list[tuple[str, int, int]]:
    """(kind, limit, amount) of every per-minute limit that is set."""
    quota = bundle[0].quota
    return [
        (kind, limit, amount)
        for kind, limit, amount in (
            ("requests", quota.requests_per_minute, len(bundle)),
            ("tokens", quota.tokens_per_minute, _tokens(bundle)),
        )
        if limit is not None
    ]


def _or_unlimited(limit: int | None) -> int:
    return -1 if limit is None else limit


def _record(wish: Wish, buckets: list[dict[str, Any]], lease_key: str, money_key: str) -> dict[str, str]:
    """Fields of ``response:{id}``, by which the end of the response gives everything back (wire/redis_keys.py)."""

    def refunds(kind: str) -> str:
        return _encode([[bucket["key"], bucket["amount"]] for bucket in buckets if bucket["kind"] == kind]).decode()

    return {
        "state": "open",
        "gateway": wish.gateway_id,
        "worker": wish.worker_id,
        "epoch": str(wish.epoch),
        "attempt": "1",
        "tenant": wish.tenant_id,
        "cls": wish.priority_class.label,
        "lease_keys": _encode([lease_key]).decode(),
        "token_refunds": refunds("tokens"),
        "request_refunds": refunds("requests"),
        "money_keys": _encode([money_key]).decode(),
        "money_reserved": str(wish.money_micros),
        "price_prompt": str(wish.prices.prompt),
        "price_cached": str(wish.prices.cached),
        "price_output": str(wish.prices.output),
    }


def _reserved(wish: Wish, window: str) -> bytes:
    reserved = Reserved(
        response_id=wish.response_id,
        tenant_id=wish.tenant_id,
        project_id=wish.project_id,
        key_id=wish.key_id,
        priority_class=wish.priority_class,
        model=wish.model,
        source=wish.source,
        money_micros=wish.money_micros,
        reserved_tokens=wish.tokens,
        window_id=window,
        policy_version=wish.policy_version,
        price_version=wish.price_version,
        requested_class=wish.requested_class,
    )
    return codec.encode([reserved])


def _limits(wish: Wish, levels: Iterable[int]) -> Limits:
    by_kind = {
        kind: BucketLevel(limit, int(level))
        for (kind, limit, _), level in zip(_per_minute([wish]), levels, strict=True)
    }
    return Limits(wish.priority_class, by_kind.get("requests"), by_kind.get("tokens"))


def _refusal(kind: str, retry_after_ms: int, bundle: Sequence[Wish], now_ms: int) -> Refusal:
    wish = bundle[0]
    quota, label, retry_after_us = wish.quota, wish.priority_class.label, retry_after_ms * 1_000
    match kind:
        case "requests":
            message = f"Rate limit reached: {quota.requests_per_minute} requests per minute in class {label}."
            return Refusal(reason=Reason.REQUESTS_PER_MINUTE, message=message, retry_after_us=retry_after_us)
        case "tokens":
            message = f"Rate limit reached: {quota.tokens_per_minute} tokens per minute in class {label}."
            return Refusal(reason=Reason.TOKENS_PER_MINUTE, message=message, retry_after_us=retry_after_us)
        case "concurrency":
            message = f"{quota.concurrency} requests at once are allowed in class {label}, and as many are running."
            if len(bundle) > 1:
                message = f"{quota.concurrency} requests at once are allowed in class {label}, and too few are free"
                message += f" for the {len(bundle)} prompts of this one."
            return Refusal(reason=Reason.CONCURRENCY, message=message, retry_after_us=retry_after_us)
        case "money":
            _, ends_at = window_span(quota.money_window, local_moment(now_ms, wish.zone))
            prompts = "prompt" if len(bundle) == 1 else f"{len(bundle)} prompts"
            output_tokens = sum(one.max_tokens for one in bundle)
            message = (
                f"The budget of this {quota.money_window} in class {label} does not cover this request at worst: its"
                f" {prompts} and {output_tokens} output tokens. It begins anew at {ends_at:%Y-%m-%d %H:%M}"
                f" ({wish.zone.key})."
            )
            return Refusal(reason=Reason.MONEY, message=message)
        case "lost":
            message = "Limits are being restored; please send the request again."
            return Refusal(reason=Reason.UNAVAILABLE, message=message, retry_after_us=retry_after_us)
        case _:
            message = "The platform's books are behind; please send the request again."
            return Refusal(reason=Reason.OVERLOADED, message=message, retry_after_us=retry_after_us)
