"""What the routes of files and batches share: the archive, queries, pages, and the words for what is not there.

Refuses to know SQL and the Bus.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from redis.exceptions import RedisError

from gateway.auth import Caller
from gateway.batches import ids
from gateway.batches.selectors import Page
from gateway.batches.services import Owner
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1.routes import Call, Route

Result = TypeVar("Result")
DEFAULT_PAGE = 20
COUNT_S = 1.0  # how long a call waits to be counted
encode = msgspec.json.Encoder().encode
_DIGITS = re.compile(r"[0-9]{1,6}\Z")


ArchiveHandler = Callable[..., Awaitable[None]]  # of exchange, archive, caller, and what the stars stood for


def route(method: str, pattern: str, handler: ArchiveHandler, *, reads_query: bool = False) -> Route:
    """A route of /v1 whose handler stands on the archive. Raises InvalidRequest (503) where a gateway keeps none."""

    async def serve(call: Call) -> None:
        if call.runtime.archive is None:
            raise invalid(Reason.UNAVAILABLE, "This gateway keeps no files.")
        await _count(call, call.runtime.archive.calls_per_minute)
        await handler(call.exchange, call.runtime.archive, call.caller, *call.arguments)

    return Route(method, pattern, serve, reads_query)


async def _count(call: Call, limit: int) -> None:
    """One call more of this tenant in this minute. Raises InvalidRequest (429). Files do not live in Redis: while it is
    down nobody counts.
    """
    now_s = time.time()
    minute = int(now_s // 60)
    key = call.runtime.redis_keys.calls(call.caller.tenant_id, minute)
    try:
        async with asyncio.timeout(COUNT_S), call.runtime.redis.pipeline(transaction=False) as pipeline:
            pipeline.incr(key)
            pipeline.expire(key, 120)
            num_calls, _ = await pipeline.execute()
    except (RedisError, TimeoutError):
        return
    if num_calls > limit:
        refusal = Refusal(
            reason=Reason.TOO_MANY_CALLS,
            message=f"At most {limit} calls a minute to files and batches.",
            retry_after_us=int(((minute + 1) * 60 - now_s) * 1_000_000),
        )
        raise InvalidRequest(refusal)


def owner_of(caller: Caller) -> Owner:
    return Owner(
        tenant_id=UUID(caller.tenant_id),
        project_id=UUID(caller.project_id),
        key_id=UUID(caller.key_id),
        key_public_id=caller.public_id,
    )


def seconds(moment: datetime | None) -> int | None:
    """As the API writes moments."""
    return None if moment is None else int(moment.timestamp())


def limit_of(query: Mapping[str, str], most: int) -> int:
    """Raises InvalidRequest."""
    text = query.get("limit", str(DEFAULT_PAGE))
    if not _DIGITS.match(text) or not 1 <= int(text) <= most:
        raise invalid(Reason.INVALID_VALUE, f"'limit' must be a whole number from 1 to {most}.", "limit")
    return int(text)


def after_of(query: Mapping[str, str], prefix: str) -> UUID | None:
    """Raises InvalidRequest for what cannot be an id; any id is a place in the list, whoever's it is."""
    text = query.get("after")
    if text is None:
        return None
    found = ids.parse(prefix, text)
    if found is None:
        raise invalid(Reason.INVALID_VALUE, f"'after' must be an id like {prefix}….", "after")
    return found


def listed(page: Page[Any], shown: Callable[[Any], dict[str, Any]]) -> bytes:
    """A list as the cursor pages of the official client read it."""
    data = [shown(row) for row in page.rows]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return encode({"object": "list", "data": data, **ends, "has_more": page.has_more})


def not_found(reason: Reason, what: str, text: str, param: str = "id") -> Refusal:
    """The same words for what is unknown, somebody else's, deleted and expired."""
    return Refusal(reason=reason, message=f"No such {what}: {text[:80]!r}.", param=param)
