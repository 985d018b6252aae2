"""What became of an operation that was sent on its way: from its record in Redis, and from the books behind it.

Knows response ids; refuses to know lines and keys. It is how nothing is computed twice: whoever drives a batch, or
comes after somebody under an Idempotency-Key, asks here first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from billing.models import OPEN, UsageRequest
from billing.pricing import CHARGED_TERMINALS
from gateway.database_threads import DatabaseThreads
from gateway.ownership import Owner, Ownership
from scheduler_engine.policy import PriorityClass
from wire.bus import FinishedOutput, GatewayBus
from wire.messages import Cancel, Released


@dataclass(frozen=True, slots=True)
class NeverSeen:
    """Nobody was let in under this id: it can be used."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """It goes on, for whomever it was asked; its end will be written down."""


@dataclass(frozen=True, slots=True)
class EndedFree:
    """It ended without an answer and without a charge; the next try is another operation."""


@dataclass(frozen=True, slots=True)
class Answered:
    """It came to its end and was charged in this class; here is the answer."""

    output: FinishedOutput
    priority_class: PriorityClass


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """It was charged, and its answer is nowhere any more."""


Fate = NeverSeen | UnderWay | EndedFree | Answered | AnswerLost


class Fates:
    """Always: two looks at an operation that has ended say the same, whoever looks."""

    def __init__(
        self,
        *,
        ownership: Ownership,
        bus: GatewayBus,
        threads: DatabaseThreads | None,
        is_served_here: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """``is_served_here``: whether this process still waits for the end of a response. Without ``threads`` there are
        no books: what Redis does not know nobody does.
        """
        self._ownership = ownership
        self._bus = bus
        self._threads = threads
        self._is_served_here = is_served_here

    async def of(self, response_id: str, tenant_id: str) -> Fate:
        """Raises BusError, and what the database raises."""
        owner = await self._ownership.owner(response_id)
        if owner is None:
            return await self._in_the_books(response_id)
        if not owner.is_open:
            return await self._ended(response_id, owner.terminal, owner.label)
        if owner.gateway_id == self._bus.gateway_id and not self._is_served_here(response_id):
            await self._give_up(response_id, tenant_id, owner)
        return UnderWay()

    async def _ended(self, response_id: str, terminal: str, label: str) -> Fate:
        if terminal not in CHARGED_TERMINALS:
            return EndedFree()
        output = await self._bus.output(response_id)
        return AnswerLost() if output is None else Answered(output, PriorityClass.from_label(label))

    async def _in_the_books(self, response_id: str) -> Fate:
        """Redis forgets a record some time after its end; the ledger does not."""
        if self._threads is None:
            return NeverSeen()
        found = await self._threads.run(lambda: UsageRequest.objects.filter(id=UUID(response_id)).first())
        if found is None:
            return NeverSeen()
        if found.state == OPEN:
            return UnderWay()
        return await self._ended(response_id, found.state, found.priority_class)

    async def _give_up(self, response_id: str, tenant_id: str, owner: Owner) -> None:
        """It is ours and nobody waits for it: its Submit was not sent, or nobody could say that it was."""
        await self._bus.append_usage(Released(response_id=response_id, tenant_id=tenant_id, reason="not_dispatched"))
        if owner.worker_id:
            cancel = Cancel(response_id=response_id, attempt=owner.attempt, reason="gateway_lost")
            await self._bus.send(owner.worker_id, cancel)
