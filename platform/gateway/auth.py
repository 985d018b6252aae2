"""Who is calling: the key of a request -> Caller, from a small cache over PostgreSQL.

Knows keys; refuses to know limits. A revoked key stops within a second (push), within 30 s at worst.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import psycopg
from psycopg.rows import class_row
from psycopg_pool import AsyncConnectionPool

from gateway.errors import Reason, Refusal
from gateway.postgresql import ANSWER_S, ASYNC_POOL_OPTIONS
from scheduler_engine.policy import PriorityClass
from tenants import api_keys
from tenants.api_keys import Match

KEY_TTL_S = 25.0  # where no push arrives; sockets and streams look again five seconds later at the latest
PATIENCE_S = 0.5  # the wait for the database where pushes vouch for what is known
AGAIN_S = 5.0  # until it is asked once more
UNKNOWN_TTL_S = 1.0  # of an id that is not there, and of a row by which somebody is refused where no push arrives
CACHE_SIZE = 10_000
_QUERY_NAMES = frozenset({"key", "api_key", "apikey", "api-key", "access_token", "token", "authorization"})
_WRONG_KEY = "Incorrect API key provided."


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A row of the key table with what the door needs of its project and tenant."""

    key_id: str
    tenant_id: str
    project_id: str
    secret_sha256: str
    default_class: str
    is_usable: bool
    expires_at_s: float | None  # wall clock, seconds
    previous_sha256: str = ""  # the secret before the last rotation, good until previous_until_s
    previous_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """``sunset_at_s`` (wall clock): when the secret that was sent stops opening, where it has been rotated away."""

    key_id: str
    public_id: str
    tenant_id: str
    project_id: str
    default_class: PriorityClass
    sunset_at_s: float | None = None


@dataclass(slots=True)
class _Known:
    stored: StoredKey | None
    until_s: float
    refuses_until_s: float = -math.inf  # where no push arrives; it has been looked up for a refusal


Result = TypeVar("Result")
Lookup = Callable[[str], Awaitable[StoredKey | None]]


class KeyStoreDown(Exception):
    """The database did not answer: nobody new is let in."""


def key_of_request(headers: Iterable[tuple[bytes, bytes]], query_string: bytes) -> str | Refusal:
    """The bearer key of a request, from exactly one Authorization header. A query string ends in logs: no key in it."""
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    if any(name.lower() in _QUERY_NAMES for name, _ in pairs):
        return Refusal(
            reason=Reason.KEY_IN_QUERY, message="Send the API key in the Authorization header, never in the URL."
        )
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if not values:
        return Refusal(reason=Reason.NO_KEY, message="No API key given. Send it as 'Authorization: Bearer <key>'.")
    if len(values) > 1:
        return Refusal(reason=Reason.INVALID_KEY, message="More than one Authorization header.")
    scheme, _, key = values[0].decode("latin-1").strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return Refusal(reason=Reason.NO_KEY, message="The Authorization header must be 'Bearer <key>'.")
    return key.strip()


class Keys:
    """Always: a wrong secret and an unknown id take the same path and get the same words; no plain key is kept.

    ``is_told`` says whether a push about a changed key would have come. While it would, and the database does not
    answer, a key that opened before goes on opening: nothing can be changed but there. While it would not, a row may be
    outdated: nobody is refused by it before it has been looked up anew, at most once a second for one key.
    """

    def __init__(
        self,
        lookup: Lookup,
        clock_s: Callable[[], float] = time.monotonic,
        wall_clock_s: Callable[[], float] = time.time,
        is_told: Callable[[], bool] = lambda: False,
    ) -> None:
        self._lookup = lookup
        self._is_told = is_told
        self._clock_s = clock_s
        self._wall_clock_s = wall_clock_s
        self._cache: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Task[StoredKey | None]] = {}
        self._used: set[str] = set()
        self._changed = asyncio.Event()
        self.num_changes = 0

    async def authenticate(self, text: str) -> Caller | Refusal:
        try:
            key = api_keys.parse(text)
        except api_keys.MalformedKey:
            return Refusal(reason=Reason.INVALID_KEY, message=_WRONG_KEY)
        try:
            caller = self._caller(key, await self._find(key.public_id))
            if caller is None and not self._is_told():
                caller = self._caller(key, await self._find_to_refuse(key.public_id))
        except KeyStoreDown:
            return Refusal(reason=Reason.UNAVAILABLE, message="Keys cannot be checked now.")
        if caller is None:
            return Refusal(reason=Reason.INVALID_KEY, message=_WRONG_KEY)
        self._used.add(caller.key_id)
        return caller

    async def is_open(self, public_id: str) -> bool:
        """Whether a key that was checked before still opens: a batch goes on in its name. Raises KeyStoreDown."""
        stored = await self._find(public_id)
        return stored is not None and self._is_usable(stored)

    def take_used(self) -> list[str]:
        """Ids of the keys that opened since the last call, each once."""
        used, self._used = sorted(self._used), set()
        return used

    def forget(self, public_id: str | None) -> None:
        """A key changed (None: any may have)."""
        if public_id is None:
            self._cache.clear()
            self._asking.clear()
        else:
            self._cache.pop(public_id, None)
            self._asking.pop(public_id, None)
        self.num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_changed(self, num_seen: int, limit_s: float) -> int:
        """Until there has been another push about any key than the ``num_seen`` first, or so long; returns how many
        there have been.
        """
        if self.num_changes == num_seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
        return self.num_changes

    def _caller(self, key: api_keys.ParsedKey, stored: StoredKey | None) -> Caller | None:
        """None where it opens nothing by this row."""
        current, previous = (stored.secret_sha256, stored.previous_sha256) if stored else ("", "")
        match = api_keys.match(key.secret, current, previous)
        if stored is None or match is Match.NONE or not self._is_usable(stored):
            return None
        sunset_at_s = stored.previous_until_s if match is Match.PREVIOUS else None
        if match is Match.PREVIOUS and (sunset_at_s is None or self._wall_clock_s() >= sunset_at_s):
            return None
        return Caller(
            stored.key_id,
            key.public_id,
            stored.tenant_id,
            stored.project_id,
            PriorityClass.from_label(stored.default_class),
            sunset_at_s,
        )

    def _is_usable(self, stored: StoredKey) -> bool:
        return stored.is_usable and (stored.expires_at_s is None or self._wall_clock_s() < stored.expires_at_s)

    async def _find(self, public_id: str) -> StoredKey | None:
        known = self._cache.get(public_id)
        if known is not None and self._clock_s() < known.until_s:
            self._cache.move_to_end(public_id)
            return known.stored
        asking = self._asked(public_id)
        if known is None or known.stored is None or not self._is_told():
            return await asyncio.shield(asking)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(asking)
        except (TimeoutError, KeyStoreDown):
            known = self._cache.get(public_id)
            if known is None or known.stored is None or not self._is_told():
                return await asyncio.shield(asking)
            known.until_s = self._clock_s() + AGAIN_S
            return known.stored

    async def _find_to_refuse(self, public_id: str) -> StoredKey | None:
        """Looked up anew, unless it was for another refusal just now; or an id that is not there."""
        known = self._cache.get(public_id)
        if known is not None and (known.stored is None or self._clock_s() < known.refuses_until_s):
            return known.stored
        stored = await asyncio.shield(self._asked(public_id))
        known = self._cache.get(public_id)
        if known is not None and known.stored is stored:
            known.refuses_until_s = self._clock_s() + UNKNOWN_TTL_S
        return stored

    def _asked(self, public_id: str) -> asyncio.Task[StoredKey | None]:
        asking = self._asking.get(public_id)
        if asking is None:
            asking = self._asking[public_id] = asyncio.create_task(self._ask(public_id))
            asking.add_done_callback(_looked_at)
        return asking

    async def _ask(self, public_id: str) -> StoredKey | None:
        """One look-up for all who ask at once; an answer that ``forget`` overtook is used once and not kept."""
        me = asyncio.current_task()
        try:
            stored = await self._lookup(public_id)
            if self._asking.get(public_id) is me:
                self._keep(public_id, stored)
            return stored
        finally:
            if self._asking.get(public_id) is me:
                del self._asking[public_id]

    def _keep(self, public_id: str, stored: StoredKey | None) -> None:
        self._cache[public_id] = _Known(stored, self._clock_s() + (KEY_TTL_S if stored else UNKNOWN_TTL_S))
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)


def _looked_at(asking: asyncio.Task[StoredKey | None]) -> None:
    """A look-up whom nobody waits for any more may fail in silence."""
    if not asking.cancelled():
        asking.exception()


_FIND_KEY = """
SELECT key.id::text AS key_id, key.tenant_id::text AS tenant_id, key.project_id::text AS project_id,
       key.secret_sha256::text AS secret_sha256, project.default_class AS default_class,
       (tenant.is_active AND key.revoked_at IS NULL AND key.role = '') AS is_usable,
       extract(epoch FROM key.expires_at)::float8 AS expires_at_s, key.previous_sha256::text AS previous_sha256,
       extract(epoch FROM key.previous_until)::float8 AS previous_until_s
FROM tenants_apikey AS key
JOIN tenants_project AS project ON project.id = key.project_id AND project.tenant_id = key.tenant_id
JOIN tenants_tenant AS tenant ON tenant.id = key.tenant_id
WHERE key.public_id = %s
"""


_NEWEST_POLICY = "SELECT coalesce(max(version), 0) FROM tenants_policyversion"
_NOTE_USED = "UPDATE tenants_apikey SET last_used_at = now() WHERE id = ANY(%s::uuid[])"


class KeyTable:
    """Keys by public id in PostgreSQL, and how far the policy is there, as app_ops. Raw SQL in an async pool: no thread
    hop on the hot path.
    """

    def __init__(self, conninfo: str, max_connections: int = 4) -> None:
        self._pool: AsyncConnectionPool = AsyncConnectionPool(
            conninfo, max_size=max_connections, kwargs={"autocommit": True}, **ASYNC_POOL_OPTIONS
        )

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        await self._pool.close()

    async def note_used(self, key_ids: Sequence[str]) -> None:
        """They opened something just now. Raises KeyStoreDown."""
        if not key_ids:
            return
        await _answer(self._note_used(key_ids))

    async def _note_used(self, key_ids: Sequence[str]) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(_NOTE_USED, (list(key_ids),))

    async def newest_policy(self) -> int:
        """The version saved last; 0 before the first. Raises KeyStoreDown."""
        return await _answer(self._newest_policy())

    async def _newest_policy(self) -> int:
        async with self._pool.connection() as connection:
            row = await (await connection.execute(_NEWEST_POLICY)).fetchone()
        return int(row[0]) if row else 0

    async def find(self, public_id: str) -> StoredKey | None:
        """Raises KeyStoreDown."""
        return await _answer(self._find(public_id))

    async def _find(self, public_id: str) -> StoredKey | None:
        async with (
            self._pool.connection() as connection,
            connection.cursor(row_factory=class_row(StoredKey)) as cursor,
        ):
            await cursor.execute(_FIND_KEY, (public_id,))
            return await cursor.fetchone()


async def _answer(asking: Coroutine[Any, Any, Result]) -> Result:
    """Not waited for any longer than ANSWER_S. The driver's own wait for a database that has stopped is endless, also
    where it is cancelled. Raises KeyStoreDown.
    """
    task = asyncio.create_task(asking)
    await asyncio.wait([task], timeout=ANSWER_S)
    if not task.done():
        task.cancel()
        raise KeyStoreDown(f"no answer within {ANSWER_S:.0f} s")
    try:
        return task.result()
    except psycopg.Error as error:
        raise KeyStoreDown(str(error)) from error
