"""Usage in buckets of time, for people and programs that ask. Reads roll-ups; minutes are read from the ledger itself.

Refuses to know an API's field names: those are the management API's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

from django.db.models import Aggregate, Count, F, Q, QuerySet, Sum
from django.db.models.functions import Trunc

from billing.models import LedgerEntry, Rollup
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


class Width(Enum):
    """Length of a bucket, and the most of them one answer holds. Buckets begin at whole ones of UTC."""

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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Half-open: [starts_at, ends_at). Always: present even where nothing was used."""

    starts_at: datetime
    ends_at: datetime
    sums: tuple[Sums, ...]


def buckets(
    *,
    tenant_id: UUID,
    starts_at: datetime,
    ends_at: datetime,
    width: Width,
    groups: Sequence[Group] = (),
    only: Filter = Filter(),
    using: str = "default",
) -> list[Bucket]:
    """One query. The first bucket holds ``starts_at``. Raises ValueError for more than ``width.most`` buckets."""
    first = width.begin(starts_at)
    count = max(0, -(-(ends_at - first) // width.length))
    if count > width.most:
        raise ValueError(f"{count} buckets of a {width.unit} were asked for; one answer has at most {width.most}")
    columns = [group.value for group in groups]
    found: dict[datetime, list[Sums]] = {}
    for row in _rows(tenant_id, first, first + count * width.length, width, columns, only, using):
        group = {name: row[name] for name in columns}
        found.setdefault(row["bucket"], []).append(Sums(group=group, **{name: row[name] for name in _SUMS}))
    edges = [first + index * width.length for index in range(count)]
    return [Bucket(edge, edge + width.length, tuple(found.get(edge, ()))) for edge in edges]


def _rows(
    tenant_id: UUID, first: datetime, end: datetime, width: Width, columns: list[str], only: Filter, using: str
) -> Iterable[dict[str, Any]]:
    source: QuerySet[Any]
    if width is Width.MINUTE:
        moment, sums = "created_at", _FROM_LEDGER
        source = LedgerEntry.objects.filter(kind__in=ENDS, attempt__isnull=False)
    else:
        moment, sums = "hour", _FROM_ROLLUPS
        source = Rollup.objects.all()
    within = {"tenant_id": tenant_id, f"{moment}__gte": first, f"{moment}__lt": end}
    bucket = F("hour") if width is Width.HOUR else Trunc(moment, width.unit)
    named = source.using(using).filter(only.condition(), **within).annotate(bucket=bucket)
    rows: Iterable[dict[str, Any]] = named.order_by("bucket", *columns).values("bucket", *columns).annotate(**sums)
    return rows
