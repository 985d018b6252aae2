"""Hourly sums of the ledger's worker-counted ends. Knows SQL sums; refuses to count anything the ledger has not just
taken.

Added to in the transaction that inserts the ledger lines, so a redelivered message never counts twice; ``rebuild``
makes them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from django.db import connection, transaction

_SUMS = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros", "num_downgraded")
_KEY = ("tenant_id", "hour", "project_id", "key_id", "priority_class", "model", "is_charged")
_COLUMNS = (*_KEY, *_SUMS)

_ADD = f"""
INSERT INTO billing_rollup ({", ".join(_COLUMNS)})
SELECT * FROM unnest(%s::uuid[], %s::timestamptz[], %s::uuid[], %s::uuid[], %s::text[], %s::text[],
                     %s::boolean[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
SET {", ".join(f"{name} = billing_rollup.{name} + excluded.{name}" for name in _SUMS)}
"""

_FROM_LEDGER = """
SELECT tenant_id, date_trunc('hour', created_at, 'UTC') AS hour, project_id, key_id, priority_class, model,
       kind = 'settle' AS is_charged, count(*)::bigint AS num_requests, sum(prompt_tokens)::bigint AS prompt_tokens,
       sum(cached_tokens)::bigint AS cached_tokens, sum(output_tokens)::bigint AS output_tokens,
       sum(amount_micros)::bigint AS cost_micros, count(nullif(requested_class, ''))::bigint AS num_downgraded
FROM billing_ledgerentry
WHERE kind IN ('settle', 'release') AND attempt IS NOT NULL AND created_at >= %s
GROUP BY 1, 2, 3, 4, 5, 6, 7
"""
_EVER = datetime(1970, 1, 1, tzinfo=UTC)

Place = tuple[str, datetime, str | None, str | None, str, str, bool]  # a row's, in the order of _KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEnd:
    """One ledger line that has just been inserted, as far as sums need it. Lines of before keys were kept have None."""

    tenant_id: UUID
    project_id: UUID | None
    key_id: UUID | None
    priority_class: str
    model: str
    is_charged: bool
    created_at: datetime
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micros: int
    num_downgraded: int = 0

    @property
    def place(self) -> Place:
        """The row it belongs to."""
        project_id, key_id = (str(value) if value else None for value in (self.project_id, self.key_id))
        hour = hour_of(self.created_at)
        return str(self.tenant_id), hour, project_id, key_id, self.priority_class, self.model, self.is_charged


def hour_of(moment: datetime) -> datetime:
    """Where its hour of UTC began. Days of zones with half hours are read from the ledger itself: statements.py."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def add(ends: Sequence[CountedEnd]) -> None:
    """Call in the transaction that inserted these lines. Rows are touched in one order everywhere, so settlers never
    deadlock.
    """
    sums: dict[Place, list[int]] = {}
    for end in ends:
        row = sums.setdefault(end.place, [0] * len(_SUMS))
        counted = (1, end.prompt_tokens, end.cached_tokens, end.output_tokens, end.cost_micros, end.num_downgraded)
        for position, value in enumerate(counted):
            row[position] += value
    if not sums:
        return
    rows = [(*place, *sums[place]) for place in sorted(sums, key=str)]
    with connection.cursor() as cursor:
        cursor.execute(_ADD, [list(column) for column in zip(*rows, strict=True)])


def rebuild(*, since: datetime = _EVER) -> int:
    """The roll-ups of the hour of ``since`` and all later ones anew from the ledger; a settler at work waits.

    Returns the number of rows made.
    """
    first = hour_of(since)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE billing_rollup IN EXCLUSIVE MODE")
        cursor.execute("DELETE FROM billing_rollup WHERE hour >= %s", [first])
        cursor.execute(f"INSERT INTO billing_rollup ({', '.join(_COLUMNS)}) {_FROM_LEDGER}", [first])
        return int(cursor.rowcount)


def num_wrong_rows(*, since: datetime = _EVER) -> int:
    """Rows of the hour of ``since`` or later that do not equal the ledger's sums, either way. 0, always."""
    first = hour_of(since)
    stored = f"SELECT {', '.join(_COLUMNS)} FROM billing_rollup WHERE hour >= %s"
    either_way = f"(({_FROM_LEDGER}) EXCEPT ({stored})) UNION ALL (({stored}) EXCEPT ({_FROM_LEDGER}))"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM ({either_way}) AS difference", [first] * 4)
        return int(cursor.fetchone()[0])
