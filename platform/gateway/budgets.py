"""What tenants' budgets have spent, as the door counts them. Reads only; refuses to know who is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db.models import QuerySet

from gateway.gate import Spent
from gateway.money_windows import window_name, window_span
from tenants.models import QuotaPolicy


class MoneyGate(Protocol):
    """The part of ``gateway.gate.Gate`` that is read."""

    def spent(self, windows: Sequence[tuple[str, str, str]]) -> list[Spent]: ...


@dataclass(frozen=True, slots=True)
class Window:
    """The day or month of a tenant's calendar that a class counts in now; ``cap_micros`` None: it has no budget."""

    tenant_id: UUID
    priority_class: str
    id: str
    starts_at: datetime
    ends_at: datetime
    cap_micros: int | None


def window_of(now: datetime, tenant_id: UUID, label: str, kind: str, cap: int | None, zone: str) -> Window:
    """``kind`` is ``day`` or ``month``."""
    local = now.astimezone(ZoneInfo(zone))
    starts_at, ends_at = (moment.astimezone(UTC) for moment in window_span(kind, local))
    return Window(tenant_id, label, window_name(kind, local), starts_at, ends_at, cap)


def windows_of(now: datetime, quotas: QuerySet[QuotaPolicy]) -> list[Window]:
    """Of each cell of the matrix, in their order."""
    names = ("tenant_id", "priority_class", "money_window", "money_micros", "tenant__timezone")
    return [window_of(now, *row) for row in quotas.values_list(*names)]


def spent_in(windows: Iterable[Window], gate: MoneyGate) -> Iterator[tuple[Window, int, Spent]]:
    """Those with a budget, with it. Raises BusError."""
    capped = [(one, one.cap_micros) for one in windows if one.cap_micros is not None]
    found = gate.spent([(str(one.tenant_id), one.priority_class, one.id) for one, _ in capped])
    for (window, cap), held in zip(capped, found, strict=True):
        yield window, cap, held
