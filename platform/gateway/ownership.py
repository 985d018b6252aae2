"""Whose a response is, and what any gateway needs to go on with it: its record and its card in Redis.

Moves a record by compare-and-set alone; refuses to know streams and sockets. Every failure is a BusError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from wire.messages import Submit
from wire.redis_bus import bus_errors
from wire.redis_keys import Keys

MOVED_MS = 2_000  # a response is taken from a living gateway at most this often
CARD_LIFETIME_S = 86_400  # like the record's while it is open; ten minutes after its end
_SCRIPT = Path(__file__).with_name("ownership.lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A response as it was asked for. ``request`` is the body as JSON, ``created_at`` in seconds since 1970."""

    tenant_id: str
    created_at: int
    request: bytes
    submit: Submit
    is_background: bool = False
    is_stored: bool = False
    key_public_id: str = ""


@dataclass(frozen=True, slots=True)
class Owner:
    """Where a response lives now, and in which class. ``terminal`` is how it ended, once ``state`` is done."""

    state: str
    gateway_id: str
    worker_id: str
    epoch: int
    attempt: int
    lease_key: str
    terminal: str
    tenant_id: str
    label: str

    @property
    def is_open(self) -> bool:
        return self.state == "open"


_card_decoder = msgspec.msgpack.Decoder(Card)
_encoder = msgspec.msgpack.Encoder()


def encode_card(card: Card) -> bytes:
    return _encoder.encode(card)


def decode_card(body: bytes) -> Card | None:
    """None when another version wrote it."""
    try:
        return _card_decoder.decode(body)
    except msgspec.DecodeError:
        return None


class Ownership:
    """Always: of two who move the same response at once, one is told that it was too late."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._move = redis.register_script(_SCRIPT)

    async def keep(self, card: Card) -> None:
        response_id = card.submit.response_id
        with bus_errors():
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.set(self._keys.card(card.tenant_id, response_id), encode_card(card), ex=CARD_LIFETIME_S)
                if card.is_background:
                    pipeline.sadd(self._keys.background, response_id)
                await pipeline.execute()

    async def card(self, tenant_id: str, response_id: str) -> Card | None:
        """None when this tenant has none, or none any more, or a newer gateway wrote it."""
        with bus_errors():
            body = cast(bytes | None, await self._redis.get(self._keys.card(tenant_id, response_id)))
        return None if body is None else decode_card(body)

    async def forget(self, tenant_id: str, response_id: str) -> None:
        """Nobody can show it any more."""
        with bus_errors():
            await self._redis.delete(self._keys.card(tenant_id, response_id), self._keys.output(response_id))

    async def owner(self, response_id: str) -> Owner | None:
        return (await self.owners([response_id]))[0]

    async def owners(self, response_ids: Sequence[str]) -> list[Owner | None]:
        names = ("state", "gateway", "worker", "epoch", "attempt", "lease_keys", "terminal", "tenant", "cls")
        with bus_errors():
            async with self._redis.pipeline(transaction=False) as pipeline:
                for response_id in response_ids:
                    pipeline.hmget(self._keys.response(response_id), *names)
                return [_owner(values) for values in await pipeline.execute()]

    async def move(
        self, response_id: str, owner: Owner, *, gateway_id: str, attempt: int, worker: tuple[str, int]
    ) -> bool:
        """False when the response has ended, or is not ``owner``'s any more."""
        arguments: list[str | int] = [owner.gateway_id, owner.attempt, gateway_id, attempt, *worker]
        with bus_errors():
            return bool(await self._move(keys=[self._keys.response(response_id)], args=arguments))

    async def may_take(self, response_id: str) -> bool:
        """From a living gateway: once in MOVED_MS, so that two clients cannot tear it to and fro."""
        with bus_errors():
            return bool(await self._redis.set(self._keys.moved(response_id), 1, nx=True, px=MOVED_MS))

    async def in_background(self) -> list[str]:
        """Responses that go on without a reader, and some that have ended."""
        with bus_errors():
            found = await cast(Any, self._redis.smembers(self._keys.background))
        return sorted(response_id.decode() for response_id in found)

    async def not_in_background(self, response_ids: Sequence[str]) -> None:
        if response_ids:
            with bus_errors():
                await cast(Any, self._redis.srem(self._keys.background, *response_ids))

    async def is_alive(self, gateway_id: str) -> bool:
        with bus_errors():
            return bool(await self._redis.exists(self._keys.alive(gateway_id)))


def _owner(values: Sequence[bytes | None]) -> Owner | None:
    if values[0] is None:
        return None
    state, gateway_id, worker_id, epoch, attempt, *others = [(value or b"").decode() for value in values]
    lease_keys, *ended = others
    lease_key = next(iter(json.loads(lease_keys or "[]")), "")
    return Owner(state, gateway_id, worker_id, int(epoch or 0), int(attempt or 1), lease_key, *ended)
