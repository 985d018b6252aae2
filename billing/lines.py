"""From a message to the ledger line it asks for. Pure: knows the charging table, refuses to know a database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from billing.messages import LedgerMessage, Release, Reservation, Settlement
from billing.pricing import CHARGED_TERMINALS, FREE, TokenPrices, charge_micros

Slot = tuple[UUID, str]
PriceKey = tuple[str, str]  # model, class label


@dataclass(frozen=True, slots=True)
class PriceList:
    """All prices of one version. Always: immutable once written, so it may be kept for ever. Version 0 is free."""

    version: int
    prices: Mapping[PriceKey, TokenPrices]

    def find(self, model: str, priority_class: str) -> TokenPrices | None:
        """None where this version knows no such model and class."""
        return FREE if self.version == 0 else self.prices.get((model, priority_class))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a ledger entry says. Always: two deliveries of one message make equal lines."""

    operation_id: UUID
    kind: str
    tenant_id: UUID
    project_id: UUID | None = None
    key_id: UUID | None = None
    priority_class: str = ""
    model: str = ""
    amount_micros: int = 0
    price_version: int = 0
    attempt: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reason: str = ""
    requested_class: str = ""  # blank: as asked for; else a lower class served it

    @property
    def slot(self) -> Slot:
        """An operation has one place for its reserve and one for its end."""
        return slot(self.operation_id, self.kind)


def slot(operation_id: UUID, kind: str) -> Slot:
    """Settle and release share a place: one of them, once."""
    return operation_id, "reserve" if kind == "reserve" else "end"


def line_of(message: LedgerMessage, prices: PriceList) -> Line:
    """The line this message writes. ``prices`` is the list at the reserved version; a model it does not know costs
    nothing.
    """
    match message:
        case Reservation():
            return Line(
                operation_id=message.operation_id,
                kind="reserve",
                tenant_id=message.tenant_id,
                project_id=message.project_id,
                key_id=message.key_id,
                priority_class=message.priority_class,
                model=message.model,
                amount_micros=message.money_micros,
                price_version=message.price_version,
                reason=message.source,
                requested_class=message.requested_class,
            )
        case Settlement():
            return _end(message, prices)
        case Release():
            return Line(
                operation_id=message.operation_id, kind="release", tenant_id=message.tenant_id, reason=message.reason
            )
        case _:
            assert_never(message)


def is_priced(message: LedgerMessage, prices: PriceList) -> bool:
    """False where tokens should be charged and there is no price for them."""
    return not isinstance(message, Settlement) or prices.find(message.model, message.priority_class) is not None


def _end(message: Settlement, prices: PriceList) -> Line:
    """A settle where tokens are owed, a release where none are: uncounted, or ended by the platform's doing."""
    counts = message.counts
    is_owed = message.terminal in CHARGED_TERMINALS and counts.total > 0
    found = prices.find(message.model, message.priority_class) or FREE
    return Line(
        operation_id=message.operation_id,
        kind="settle" if is_owed else "release",
        tenant_id=message.tenant_id,
        project_id=message.project_id,
        key_id=message.key_id,
        priority_class=message.priority_class,
        model=message.model,
        amount_micros=charge_micros(message.terminal, counts, found),
        price_version=prices.version,
        attempt=message.attempt,
        prompt_tokens=counts.prompt,
        cached_tokens=counts.cached,
        output_tokens=counts.output,
        reason=message.terminal.value,
        requested_class=message.requested_class,
    )
