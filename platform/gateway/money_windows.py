"""The days and months of a tenant's calendar that its money is counted in. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

from scheduler_engine.policy import TenantClassPolicy


def local_moment(now_ms: int, zone: ZoneInfo) -> datetime:
    return datetime.fromtimestamp(now_ms / 1_000, tz=UTC).astimezone(zone)


def window_id(quota: TenantClassPolicy, zone: ZoneInfo, now_ms: int) -> str:
    """The calendar window, in the tenant's zone, that a reservation made now belongs to."""
    return window_name(quota.money_window, local_moment(now_ms, zone))


def window_name(kind: str, local: datetime) -> str:
    """Of the ``day`` or ``month`` of the tenant's calendar in which that moment lies."""
    return local.strftime("%Y-%m-%d" if kind == "day" else "%Y-%m")


def window_span(kind: str, local: datetime) -> tuple[datetime, datetime]:
    """Its midnights, in the zone of that moment: the first, and the one at which the next window begins."""
    first = local.date() if kind == "day" else local.date().replace(day=1)
    after = first + timedelta(days=1) if kind == "day" else (first + timedelta(days=31)).replace(day=1)
    return datetime.combine(first, time(), local.tzinfo), datetime.combine(after, time(), local.tzinfo)
