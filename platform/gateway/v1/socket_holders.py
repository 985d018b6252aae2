"""Who is at a websocket: a client with a key, or a member of a tenant on a page of the console, by ticket.

Refuses to know frames and lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.auth import Caller, Keys, key_of_request
from gateway.console import account, tickets
from gateway.errors import Reason, Refusal
from gateway.response_stream import End
from gateway.runtime import Runtime
from gateway.v1.response_events import Event
from wire.bus import BusError
from wire.messages import Submit


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A client with a key."""

    keys: Keys
    text: str

    async def authenticate(self) -> Caller | Refusal:
        return await self.keys.authenticate(self.text)


async def who_holds(runtime: Runtime, scope: Any) -> KeyHolder | tickets.Visit | Refusal:
    """By the handshake. A key is checked when ``authenticate`` is called, a ticket is used up here."""
    key = key_of_request(scope["headers"], scope["query_string"])
    secret = tickets.secret_in(scope.get("subprotocols") or ())
    if secret is None:
        return key if isinstance(key, Refusal) else KeyHolder(runtime.keys, key)
    try:
        return await tickets.visit(runtime.redis, runtime.redis_keys, secret, scope["headers"], key)
    except BusError:
        return Refusal(reason=Reason.UNAVAILABLE, message="Tickets cannot be checked now.")


def account_of(runtime: Runtime, member: tickets.Visit, name: str, submit: Submit, end: End) -> Event:
    """What a response took, for a page of the console: a frame behind the last event, without a number."""
    view = runtime.policy.view
    prices = None
    if member.ticket.sees_money and view is not None and view.price_version == submit.price_version:
        prices = view.prices.get((submit.model, submit.priority_class))
    return account.account(name, end, prices)
