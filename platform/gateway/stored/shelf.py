"""The durable shelf of finished responses: put, take down, throw away, beside the event loop and off the hot path.

Knows one tenant at a time; refuses to know what is in a response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, TypeVar
from uuid import UUID

from gateway.database_threads import DatabaseThreads
from gateway.ownership import Card, decode_card, encode_card
from gateway.postgresql import AWAY
from gateway.stored.models import StoredResponse
from tenants.isolation import ALIAS, tenant
from wire import codec
from wire.bus import BusError, FinishedOutput

LIFETIME = timedelta(days=30)
Result = TypeVar("Result")


class ShelfDown(BusError):
    """The database does not answer; answered 503 like every memory of the platform that is away."""


@dataclass(frozen=True, slots=True)
class Stored:
    card: Card
    output: FinishedOutput


class ResponseShelf(Protocol):
    """Always: what one tenant put there another one cannot take down."""

    async def put(self, card: Card, output: FinishedOutput) -> None: ...

    async def take_down(self, tenant_id: str, response_id: str) -> Stored | None: ...

    async def throw_away(self, tenant_id: str, response_id: str) -> None: ...


class DatabaseShelf:
    """In PostgreSQL, as app_rw behind the wall. A second put of the same response changes nothing."""

    def __init__(self, threads: DatabaseThreads) -> None:
        self._threads = threads

    async def put(self, card: Card, output: FinishedOutput) -> None:
        row = StoredResponse(
            id=UUID(card.submit.response_id),
            tenant_id=UUID(card.tenant_id),
            card=encode_card(card),
            output=codec.encode_output(output),
        )

        def work() -> None:
            with tenant(UUID(card.tenant_id)):
                StoredResponse.objects.using(ALIAS).bulk_create([row], ignore_conflicts=True)

        await self._run(work)

    async def take_down(self, tenant_id: str, response_id: str) -> Stored | None:
        def work() -> StoredResponse | None:
            with tenant(UUID(tenant_id)):
                return StoredResponse.objects.using(ALIAS).filter(id=UUID(response_id)).first()

        row = await self._run(work)
        if row is None:
            return None
        card, output = decode_card(bytes(row.card)), codec.decode_output(bytes(row.output))
        return None if card is None or output is None else Stored(card, output)

    async def throw_away(self, tenant_id: str, response_id: str) -> None:
        def work() -> None:
            with tenant(UUID(tenant_id)):
                StoredResponse.objects.using(ALIAS).filter(id=UUID(response_id)).delete()

        await self._run(work)

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await self._threads.run(work)
        except AWAY as error:
            raise ShelfDown("stored responses cannot be reached") from error


def sweep(now: datetime) -> int:
    """Throws away what is older than its lifetime, as app_ops; returns how many."""
    deleted, _ = StoredResponse.objects.filter(stored_at__lt=now - LIFETIME).delete()
    return deleted
