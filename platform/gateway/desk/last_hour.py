"""The calls of the last hour, as the books know them, for the door's arithmetic. Refuses to know limits."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from billing.models import UsageRequest
from gateway.desk.door_preview import Call

MOST_CALLS = 200_000
HOUR = timedelta(hours=1)


def calls_before(now: datetime) -> list[Call]:
    """Oldest first, MOST_CALLS at most; what still runs is taken to end now."""
    rows = UsageRequest.objects.filter(reserved_at__gte=now - HOUR, reserved_at__lte=now).order_by("reserved_at")
    columns = (
        "tenant_id",
        "priority_class",
        "reserved_at",
        "ended_at",
        "reserved_tokens",
        "prompt_tokens",
        "output_tokens",
    )
    return [
        Call(
            at_us=_us(reserved_at),
            ended_us=_us(ended_at or now),
            place=f"{tenant_id} {label}",
            reserved_tokens=reserved,
            used_tokens=prompt + output,
        )
        for tenant_id, label, reserved_at, ended_at, reserved, prompt, output in rows.values_list(*columns)[:MOST_CALLS]
    ]


def _us(moment: Any) -> int:
    """The column may be empty, but not in rows that were found by it."""
    return int(moment.timestamp() * 1_000_000)
