"""Single-use tickets: how a page of the console opens the API's own socket in its member's name.

Knows sessions and memberships; refuses to know frames. A key in a page could be stolen, a cookie alone could be used by
another site's page: a ticket opens once, within TICKET_S, for the page it was made for.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
from django.conf import settings
from django.http import parse_cookie
from redis.asyncio import Redis

from gateway.auth import Caller
from gateway.console.sessions import user_of
from gateway.database_threads import asked
from gateway.errors import Reason, Refusal
from gateway.postgresql import AWAY
from scheduler_engine.policy import PriorityClass
from tenants.models import Membership
from tenants.roles import Capability, Role, may
from wire.redis_bus import bus_errors, connect
from wire.redis_keys import Keys

TICKET_S = 30
RECHECK_S = 15.0
PROTOCOL = "openai-responses.v1"  # the only one that is ever selected: a ticket is not said again
_PREFIX = "ticket."
_NO_TICKET = Refusal(reason=Reason.INVALID_KEY, message="This ticket opens nothing, or not any more.")
_NOT_WELCOME = Refusal(reason=Reason.INVALID_KEY, message="You are signed out, or may not use the playground any more.")
_UNKNOWN = Refusal(reason=Reason.UNAVAILABLE, message="Accounts cannot be looked up now.")


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """For whom, for which project, and from which page."""

    user_id: int
    tenant_id: str
    project_id: str
    default_class: str
    origin: str
    sees_money: bool


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Ticket)


def issue(ticket: Ticket) -> str:
    """What the page sends as its second subprotocol. Raises BusError."""
    secret = secrets.token_urlsafe(32)
    with bus_errors(), connect(settings.REDIS_URL) as client:
        client.set(_place(Keys(settings.RUBATO_REDIS_PREFIX), secret), _encode(ticket), ex=TICKET_S)
    return _PREFIX + secret


async def take(redis: Redis, keys: Keys, secret: str) -> Ticket | None:
    """None for one that was used, has ended, or never was. Raises BusError."""
    with bus_errors():
        body = await redis.getdel(_place(keys, secret))
    return _decoder.decode(body) if isinstance(body, bytes) else None


def secret_in(subprotocols: Sequence[str]) -> str | None:
    """Of the ticket among what a page offers."""
    return next((one.removeprefix(_PREFIX) for one in subprotocols if one.startswith(_PREFIX)), None)


def _place(keys: Keys, secret: str) -> str:
    """Who reads Redis learns no ticket that opens."""
    return f"{keys.prefix}ticket:{hashlib.sha256(secret.encode()).hexdigest()}"


class Visit:
    """A member at a socket. Always: asked again every RECHECK_S whether session, membership and role still stand."""

    def __init__(self, ticket: Ticket, session_key: str, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.ticket = ticket
        self._session_key = session_key
        self._clock_s = clock_s
        self._asked_at_s: float | None = None
        self._answer: Caller | Refusal = _NO_TICKET

    async def authenticate(self) -> Caller | Refusal:
        now_s = self._clock_s()
        if self._asked_at_s is None or now_s - self._asked_at_s >= RECHECK_S:
            self._answer, self._asked_at_s = await self._ask(), now_s
        return self._answer

    async def _ask(self) -> Caller | Refusal:
        try:
            is_welcome = await asked(partial(_is_welcome, self.ticket, self._session_key))
        except AWAY:
            return _UNKNOWN
        return caller_of(self.ticket) if is_welcome else _NOT_WELCOME


async def visit(
    redis: Redis, keys: Keys, secret: str, headers: Iterable[tuple[bytes, bytes]], key_refusal: Refusal | str
) -> Visit | Refusal:
    """The member behind a ticket. A key in the URL or beside the ticket is refused as it is without one."""
    if isinstance(key_refusal, str) or key_refusal.reason is not Reason.NO_KEY:
        return key_refusal if isinstance(key_refusal, Refusal) else _NO_TICKET
    ticket = await take(redis, keys, secret)
    given = dict(headers)
    if ticket is None or given.get(b"origin", b"").decode("latin-1") != ticket.origin:
        return _NO_TICKET
    cookies = parse_cookie(given.get(b"cookie", b"").decode("latin-1"))
    return Visit(ticket, cookies.get(settings.SESSION_COOKIE_NAME, ""))


def caller_of(ticket: Ticket) -> Caller:
    """Nobody's key: what is asked here is counted on the project alone."""
    default_class = PriorityClass.from_label(ticket.default_class)
    return Caller("", "", ticket.tenant_id, ticket.project_id, default_class)


def _is_welcome(ticket: Ticket, session_key: str) -> bool:
    user = user_of(session_key)
    if not user.is_active or user.pk != ticket.user_id:
        return False
    tenant_id = uuid.UUID(ticket.tenant_id)
    found = Membership.objects.filter(user_id=ticket.user_id, tenant_id=tenant_id, tenant__is_active=True).first()
    return found is not None and may(Role(found.role), Capability.USE_PLAYGROUND)
