"""Days of a tenant closed into statements, from the ledger alone. Refuses to compute an amount: the ledger holds them.

A day closes GRACE after its midnight in the tenant's zone, when no transaction of that day can still commit.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, time, timedelta
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db import connection, transaction
from django.db.models import Min, Q, QuerySet, Sum

from billing.models import CORRECTIONS, LedgerEntry, Statement
from billing.statement_lines import lines_of
from tenants.models import Tenant

GRACE = timedelta(minutes=10)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """An adjustment (positive: charged) or a credit (positive: in the tenant's favour)."""

    kind: str
    entry_key: str
    operation_id: str
    amount_micros: int
    reason: str
    at: str


@dataclass(frozen=True, slots=True)
class Day:
    """A day of a tenant's calendar, and the half-open span of entries that its statement holds."""

    day: date
    starts_at: datetime
    ends_at: datetime

    @property
    def closes_at(self) -> datetime:
        return self.ends_at + GRACE


class NotAllClosed(Exception):
    """Days of some tenants could not be closed; those of all others were. Nothing is lost: the next run tries again."""


def close_due_days(now: datetime) -> list[Statement]:
    """Closes every day that is over and has entries, of every tenant. Again, or twice at once, is harmless.

    Raises NotAllClosed after the last tenant, and at once only what the loss of the database raises.
    """
    closed = []
    failures: dict[str, Exception] = {}
    for tenant in Tenant.objects.order_by("id"):
        try:
            while statement := _close_next_day(tenant, now):
                closed.append(statement)
        except Exception as error:
            if not connection.is_usable():
                raise
            failures[tenant.slug] = error
            log.error("the days of tenant %s are not closed: %s", tenant.slug, error)
    if failures:
        raise NotAllClosed(f"days are not closed of: {', '.join(failures)}") from next(iter(failures.values()))
    return closed


def num_wrong(statements: list[Statement]) -> int:
    """Of these, how many do not equal what the ledger says of their span. 0, always."""
    return sum(_totals(one.tenant_id, one.starts_at, one.ends_at) != _stated(one) for one in statements)


@transaction.atomic
def _close_next_day(tenant: Tenant, now: datetime) -> Statement | None:
    """None while that day is not over."""
    found = open_day(tenant)
    if found is None or found.closes_at > now:
        return None
    return _written(tenant, found)


def so_far(tenant: Tenant, day: Day, now: datetime) -> Statement:
    """An open day, as its statement would read if it had ended ``now``; nothing is written."""
    return _drawn_up(tenant, replace(day, ends_at=min(day.ends_at, now)))


def open_day(tenant: Tenant) -> Day | None:
    """The day of the oldest entry that no statement holds yet."""
    zone = ZoneInfo(tenant.timezone)
    before = Statement.objects.filter(tenant=tenant).order_by("-starts_at").first()
    entries = LedgerEntry.objects.filter(tenant_id=tenant.id)
    if before is not None:
        entries = entries.filter(created_at__gte=before.ends_at)
    oldest = entries.aggregate(oldest=Min("created_at"))["oldest"]
    if oldest is None:
        return None
    day = oldest.astimezone(zone).date()
    if before is not None:  # the zone may have been edited: days never repeat
        day = max(day, before.day + timedelta(days=1))
    ends_at = _midnight(day + timedelta(days=1), zone)
    # Days without entries have no statement, so this span may begin long before its day, with nothing in it.
    starts_at = before.ends_at if before is not None else min(_midnight(day, zone), oldest)
    return Day(day, starts_at, ends_at)


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), tzinfo=zone)


def _written(tenant: Tenant, found: Day) -> Statement | None:
    """None where another closer was faster: it wrote the same."""
    statement = _drawn_up(tenant, found)
    Statement.objects.bulk_create([statement], ignore_conflicts=True)
    return Statement.objects.filter(id=statement.id).first()


def _drawn_up(tenant: Tenant, found: Day) -> Statement:
    starts_at, ends_at = found.starts_at, found.ends_at
    charged, adjusted, credited = _totals(tenant.id, starts_at, ends_at)
    return Statement(
        tenant=tenant,
        day=found.day,
        zone=tenant.timezone,
        starts_at=starts_at,
        ends_at=ends_at,
        lines=[asdict(line) for line in lines_of(tenant.id, _span(tenant.id, starts_at, ends_at))],
        corrections=[asdict(one) for one in _corrections(tenant.id, starts_at, ends_at)],
        charged_micros=charged,
        adjusted_micros=adjusted,
        credited_micros=credited,
        total_micros=charged + adjusted - credited,
    )


def _stated(statement: Statement) -> tuple[int, int, int]:
    return statement.charged_micros, statement.adjusted_micros, statement.credited_micros


def _totals(tenant_id: UUID, starts_at: datetime, ends_at: datetime) -> tuple[int, int, int]:
    """(charged, adjusted, credited) of a span."""
    sums = _span(tenant_id, starts_at, ends_at).aggregate(
        charged=Sum("amount_micros", filter=Q(kind="settle"), default=0),
        adjusted=Sum("amount_micros", filter=Q(kind="adjust"), default=0),
        credited=Sum("amount_micros", filter=Q(kind="credit"), default=0),
    )
    return sums["charged"], sums["adjusted"], sums["credited"]


def _span(tenant_id: UUID, starts_at: datetime, ends_at: datetime) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(tenant_id=tenant_id, created_at__gte=starts_at, created_at__lt=ends_at)


def _corrections(tenant_id: UUID, starts_at: datetime, ends_at: datetime) -> list[Correction]:
    return [
        Correction(
            kind=entry.kind,
            entry_key=entry.entry_key,
            operation_id=str(entry.operation_id),
            amount_micros=entry.amount_micros,
            reason=entry.reason,
            at=entry.created_at.isoformat(),
        )
        for entry in _span(tenant_id, starts_at, ends_at).filter(kind__in=CORRECTIONS).order_by("id")
    ]
