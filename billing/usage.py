"""Usage and costs in buckets of time, for people and programs that ask. Reads roll-ups; minutes and corrections are
read from the ledger itself.

Refuses to know an API's field names: those are the management API's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum, StrEnum
from itertools import pairwise
from typing import Any, Generic, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db.models import Aggregate, BooleanField, Count, ExpressionWrapper, F, Q, QuerySet, Sum
from django.db.models.functions import Trunc, TruncDate

from billing.models import CORRECTIONS, LedgerEntry, Rollup
from billing.selectors import ENDS

_SUMS = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros", "num_downgraded")
_FROM_ROLLUPS: dict[str, Aggregate] = {name: Sum(name) for name in _SUMS}
_FROM_LEDGER: dict[str, Aggregate] = {
    "num_requests": Count("id"),
    "prompt_tokens": Sum("prompt_tokens"),
    "cached_tokens": Sum("cached_tokens"),
    "output_tokens": Sum("output_tokens"),
    "cost_micros": Sum("amount_micros"),
    "num_downgraded": Count("id", filter=~Q(requested_class="")),
}
_IS_SETTLED = ExpressionWrapper(Q(kind="settle"), output_field=BooleanField())


class Width(Enum):
    """Length of a bucket, and the most of them one answer holds. Buckets begin at whole ones of UTC, days also at the
    midnights of a zone.
    """

    MINUTE = ("minute", timedelta(minutes=1), 1_440)
    HOUR = ("hour", timedelta(hours=1), 168)
    DAY = ("day", timedelta(days=1), 366)

    def __init__(self, unit: str, length: timedelta, most: int) -> None:
        self.unit, self.length, self.most = unit, length, most

    def begin(self, moment: datetime) -> datetime:
        """The beginning of the bucket that holds the moment."""
        since_epoch = moment.timestamp()
        seconds = int(self.length.total_seconds())
        return moment - timedelta(seconds=since_epoch % seconds)


class Group(Enum):
    """What sums may be told apart by; the value is a column."""

    PROJECT = "project_id"
    KEY = "key_id"
    MODEL = "model"
    CLASS = "priority_class"
    CHARGED = "is_charged"  # of usage alone: what was used and charged to nobody owes nothing


@dataclass(frozen=True, slots=True)
class Filter:
    """Only these; an empty sequence is all."""

    project_ids: Sequence[UUID] = ()
    key_ids: Sequence[UUID] = ()
    models: Sequence[str] = ()
    classes: Sequence[str] = ()

    def condition(self) -> Q:
        wanted = {
            "project_id__in": self.project_ids,
            "key_id__in": self.key_ids,
            "model__in": self.models,
            "priority_class__in": self.classes,
        }
        return Q(**{name: list(values) for name, values in wanted.items() if values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """One group's sums in one bucket. ``group`` holds the values of the groups asked for, by column.

    ``num_downgraded``: of the requests, those that asked for a higher class than the one that served and charged them.
    """

    group: dict[str, object] = field(default_factory=dict)
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micros: int
    num_downgraded: int = 0


class LineItem(StrEnum):
    """What an amount is for."""

    USAGE = "usage"
    ADJUSTMENT = "adjustment"
    CREDIT = "credit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one group owes of one bucket, below 0 where more was given back. ``line_item``: None is all of them."""

    group: dict[str, object]
    line_item: LineItem | None
    amount_micros: int


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Bucket(Generic[Part]):
    """Half-open: [starts_at, ends_at). Always: present even where it has no parts."""

    starts_at: datetime
    ends_at: datetime
    parts: tuple[Part, ...]


def buckets(
    *,
    tenant_id: UUID,
    starts_at: datetime,
    ends_at: datetime,
    width: Width,
    groups: Sequence[Group] = (),
    only: Filter = Filter(),
    using: str = "default",
) -> list[Bucket[Sums]]:
    """One query. The first bucket holds ``starts_at``. Raises ValueError for more than ``width.most`` buckets."""
    first = width.begin(starts_at)
    count = _bounded(max(0, -(-(ends_at - first) // width.length)), width)
    columns = [group.value for group in groups]
    found: dict[datetime, list[Sums]] = {}
    for row in _rows(tenant_id, first, first + count * width.length, width, columns, only, using):
        group = {name: row[name] for name in columns}
        found.setdefault(row["bucket"], []).append(Sums(group=group, **{name: row[name] for name in _SUMS}))
    edges = [first + index * width.length for index in range(count)]
    return [Bucket(edge, edge + width.length, tuple(found.get(edge, ()))) for edge in edges]


def days(
    *, tenant_id: UUID, first: date, last: date, zone: ZoneInfo, groups: Sequence[Group] = (), using: str = "default"
) -> list[Bucket[Sums]]:
    """The days of a zone's calendar, both named ones included: those of statements. One query. Roll-ups are of whole
    hours of UTC: one that a midnight cuts, as half-hour zones have them, counts whole to the day in which it begins.
    Raises as ``buckets``.
    """
    count = _bounded(max(0, (last - first).days + 1), Width.DAY)
    edges = [_midnight(first + timedelta(days=index), zone) for index in range(count + 1)]
    columns = [group.value for group in groups]
    hours = Rollup.objects.using(using).filter(tenant_id=tenant_id, hour__gte=edges[0], hour__lt=edges[-1])
    named = hours.annotate(day=TruncDate("hour", tzinfo=zone)).order_by("day", *columns).values("day", *columns)
    found: dict[date, list[Sums]] = {}
    for row in named.annotate(**_FROM_ROLLUPS):
        group = {name: row[name] for name in columns}
        found.setdefault(row["day"], []).append(Sums(group=group, **{name: row[name] for name in _SUMS}))
    return [
        Bucket(start, end, tuple(found.get(first + timedelta(days=index), ())))
        for index, (start, end) in enumerate(pairwise(edges))
    ]


def _bounded(count: int, width: Width) -> int:
    if count > width.most:
        raise ValueError(f"{count} buckets of a {width.unit} were asked for; one answer has at most {width.most}")
    return count


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def costs(
    *,
    tenant_id: UUID,
    starts_at: datetime,
    ends_at: datetime,
    width: Width,
    groups: Sequence[Group] = (),
    by_line_item: bool = False,
    only: Filter = Filter(),
    using: str = "default",
) -> list[Bucket[Cost]]:
    """What operations were charged, and the corrections that were written meanwhile: an adjustment in the groups of its
    operation, a credit in none. Over any span their sum is that of a statement: charged + adjusted - credited.
    Two queries. Raises as ``buckets``.
    """
    used = buckets(
        tenant_id=tenant_id, starts_at=starts_at, ends_at=ends_at, width=width, groups=groups, only=only, using=using
    )
    columns = [group.value for group in groups]
    corrections = _corrections(tenant_id, used, width, columns, only, using)
    found = []
    for bucket in used:
        amounts: dict[tuple[tuple[object, ...], LineItem | None], int] = {}
        charged = [(sums.group, LineItem.USAGE, sums.cost_micros) for sums in bucket.parts]
        for group, line_item, amount in [*charged, *corrections.get(bucket.starts_at, ())]:
            place = tuple(group[column] for column in columns), line_item if by_line_item else None
            amounts[place] = amounts.get(place, 0) + amount
        parts = (
            Cost(group=dict(zip(columns, values, strict=True)), line_item=line_item, amount_micros=amount)
            for (values, line_item), amount in amounts.items()
        )
        found.append(Bucket(bucket.starts_at, bucket.ends_at, tuple(parts)))
    return found


def _rows(
    tenant_id: UUID, first: datetime, end: datetime, width: Width, columns: list[str], only: Filter, using: str
) -> Iterable[dict[str, Any]]:
    source: QuerySet[Any]
    if width is Width.MINUTE:
        moment, sums = "created_at", _FROM_LEDGER
        source = LedgerEntry.objects.filter(kind__in=ENDS, attempt__isnull=False).annotate(is_charged=_IS_SETTLED)
    else:
        moment, sums = "hour", _FROM_ROLLUPS
        source = Rollup.objects.all()
    within = {"tenant_id": tenant_id, f"{moment}__gte": first, f"{moment}__lt": end}
    bucket = F("hour") if width is Width.HOUR else Trunc(moment, width.unit)
    named = source.using(using).filter(only.condition(), **within).annotate(bucket=bucket)
    rows: Iterable[dict[str, Any]] = named.order_by("bucket", *columns).values("bucket", *columns).annotate(**sums)
    return rows


_Amount = tuple[dict[str, object], LineItem, int]


def _corrections(
    tenant_id: UUID, spans: Sequence[Bucket[Sums]], width: Width, columns: list[str], only: Filter, using: str
) -> dict[datetime, list[_Amount]]:
    """By the beginning of their bucket."""
    if not spans:
        return {}
    within = {"created_at__gte": spans[0].starts_at, "created_at__lt": spans[-1].ends_at}
    entries = LedgerEntry.objects.using(using).filter(only.condition(), tenant_id=tenant_id, **within)
    rows = (
        entries.filter(kind__in=CORRECTIONS)
        .annotate(bucket=Trunc("created_at", width.unit))
        .order_by("bucket", *columns, "kind")
        .values("bucket", *columns, "kind")
        .annotate(amount=Sum("amount_micros"))
    )
    found: dict[datetime, list[_Amount]] = {}
    for row in rows:
        group = {column: row[column] for column in columns}
        is_credit = row["kind"] == "credit"
        item, amount = (LineItem.CREDIT, -row["amount"]) if is_credit else (LineItem.ADJUSTMENT, row["amount"])
        found.setdefault(row["bucket"], []).append((group, item, amount))
    return found
