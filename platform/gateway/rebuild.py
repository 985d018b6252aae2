"""Brings the gate in Redis back from the books when Redis has lost it. Until then nobody is let in (``limits.lua``).

Knows money windows, open reservations and the policy; refuses to restore buckets (a lost one is full) and to guess what
was on its way to the books. Deleting ``gate:built`` by hand is how an operator has the gate built anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from django.utils import timezone

from billing import selectors
from billing.lines import PriceList
from billing.models import UsageRequest
from billing.pricing import FREE
from gateway.admission import LEASE_MS, RECORD_LIFETIME_S
from gateway.reconciliation import WINDOWS_LIVE
from tenants import services
from wire.redis_bus import bus_errors, connect
from wire.redis_keys import Keys

STILL_S = 0.5  # a settler may hold entries of a stream that is gone: books that do not move for so long are complete
FORGOTTEN_S = 5.0  # a look as old as this was at another loss, which somebody else repaired
WINDOW_LIFETIME_S = 3_456_000  # as limits.lua keeps a window: 40 days
_SCRIPT = Path(__file__).with_name("rebuild.lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Look:
    """The books, and where the usage stream stood before they were read."""

    position: str
    books: dict[str, Any]


@dataclass(slots=True)
class _Seen:
    """Since when the books have looked like this, and when that was last so."""

    look: _Look
    first_s: float
    last_s: float


class GateBuilder:
    """Always: the gate is built from books that hold all that was ever in the usage stream, and by one builder alone.

    Amounts are set, never added: a second build of the same books changes nothing.
    """

    def __init__(self, url: str, keys: Keys, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._keys = keys
        self._clock_s = clock_s
        self._seen: _Seen | None = None

    def build(self) -> bool:
        """True once the gate stands; False while usage waits to be booked or the books may still move: ask again.

        Raises BusError or django.db.Error.
        """
        with bus_errors(), connect(self._url) as client:
            return self._build(client)

    def _build(self, client: redis.Redis) -> bool:
        if client.exists(self._keys.gate_built):
            return True
        position = _position(client, self._keys.usage)
        if position is None:
            return False
        look = _Look(position, _books(self._keys))
        if look.books["windows"] and not self._stood_still(look):
            return False
        services.publish_policy()
        names = (self._keys.gate_built, self._keys.usage)
        arguments = (position, json.dumps(look.books), f"{self._keys.prefix}money:*")
        client.register_script(_SCRIPT)(keys=names, args=arguments)
        return bool(client.exists(self._keys.gate_built))

    def _stood_still(self, look: _Look) -> bool:
        now_s = self._clock_s()
        if self._seen is None or self._seen.look != look or now_s - self._seen.last_s > FORGOTTEN_S:
            self._seen = _Seen(look, now_s, now_s)
        self._seen.last_s = now_s
        return now_s - self._seen.first_s >= STILL_S


def _position(client: redis.Redis, usage: str) -> str | None:
    """Where a drained usage stream stands, empty where there is none; None while entries wait in it."""
    if not client.exists(usage):
        return ""
    about = client.xinfo_stream(usage)
    return None if about["length"] else about["last-generated-id"].decode()


def _books(keys: Keys) -> dict[str, Any]:
    """The argument of rebuild.lua."""
    operations = selectors.open_operations()
    prices = selectors.price_lists(operation.price_version for operation in operations)
    return {
        "window_s": WINDOW_LIFETIME_S,
        "record_s": RECORD_LIFETIME_S,
        "lease_ms": LEASE_MS,
        "windows": [
            {
                "key": keys.money(str(sums.tenant_id), sums.priority_class, sums.window_id),
                "open": str(sums.open_micros),
                "settled": str(sums.settled_micros),
            }
            for sums in selectors.window_sums(since=timezone.now() - WINDOWS_LIVE)
        ],
        "operations": [_operation(keys, operation, prices[operation.price_version]) for operation in operations],
    }


def _operation(keys: Keys, operation: UsageRequest, price_list: PriceList) -> dict[str, Any]:
    """An open reservation and its record. It names no gateway: one that still knows it ends it, or else the sweep."""
    tenant_id, label = str(operation.tenant_id), operation.priority_class
    lease = keys.lease(tenant_id, label)
    prices = price_list.find(operation.model, label) or FREE
    fields = {
        "state": "open",
        "attempt": "1",
        "tenant": tenant_id,
        "cls": label,
        "lease_keys": json.dumps([lease]),
        "money_keys": json.dumps([keys.money(tenant_id, label, operation.window_id)]),
        "money_reserved": str(operation.reserved_micros),
        "price_prompt": str(prices.prompt),
        "price_cached": str(prices.cached),
        "price_output": str(prices.output),
    }
    return {"id": str(operation.id), "key": keys.response(str(operation.id)), "lease": lease, "fields": fields}
