"""Hourly sums of the ledger's worker-counted ends. Knows SQL sums; refuses to count anything the ledger has not just
taken.

Added to in the transaction that inserts the ledger lines, so a redelivered message never counts twice; ``rebuild``
makes them anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import connection, transaction

_SUMS = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros")
_KEY = ("tenant_id", "priority_class", "model", "hour")
_COLUMNS = (*_KEY, *_SUMS)

_ADD = f"""
INSERT INTO billing_rollup ({", ".join(_COLUMNS)})
SELECT * FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::timestamptz[],
                     %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[])
ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
SET {", ".join(f"{name} = billing_rollup.{name} + excluded.{name}" for name in _SUMS)}
"""

_FROM_LEDGER = """
SELECT tenant_id, priority_class, model, date_trunc('hour', created_at, 'UTC') AS hour,
       count(*)::bigint AS num_requests, sum(prompt_tokens)::bigint AS prompt_tokens,
       sum(cached_tokens)::bigint AS cached_tokens, sum(output_tokens)::bigint AS output_tokens,
       sum(amount_micros)::bigint AS cost_micros
FROM billing_ledgerentry
WHERE kind IN ('settle', 'release') AND attempt IS NOT NULL
GROUP BY 1, 2, 3, 4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEnd:
    """One ledger line that has just been inserted, as far as sums need it."""

    tenant_id: UUID
    priority_class: str
    model: str
    created_at: datetime
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micros: int


def add(ends: Sequence[CountedEnd]) -> None:
    """Call in the transaction that inserted these lines. Rows are touched in one order everywhere, so settlers never
    deadlock.
    """
    sums: dict[tuple[str, str, str, datetime], list[int]] = defaultdict(lambda: [0] * len(_SUMS))
    for end in ends:
        hour = end.created_at.replace(minute=0, second=0, microsecond=0)
        row = sums[str(end.tenant_id), end.priority_class, end.model, hour]
        for position, value in enumerate((1, end.prompt_tokens, end.cached_tokens, end.output_tokens, end.cost_micros)):
            row[position] += value
    if not sums:
        return
    rows = [(*key, *sums[key]) for key in sorted(sums)]
    with connection.cursor() as cursor:
        cursor.execute(_ADD, [list(column) for column in zip(*rows, strict=True)])


def rebuild() -> int:
    """All roll-ups anew from the ledger; a settler at work waits. Returns the number of rows."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE billing_rollup IN EXCLUSIVE MODE")
        cursor.execute("DELETE FROM billing_rollup")
        cursor.execute(f"INSERT INTO billing_rollup ({', '.join(_COLUMNS)}) {_FROM_LEDGER}")
        return int(cursor.rowcount)


def num_wrong_rows() -> int:
    """Rows that do not equal the ledger's sums, either way. 0, always."""
    stored = f"SELECT {', '.join(_COLUMNS)} FROM billing_rollup"
    either_way = f"(({_FROM_LEDGER}) EXCEPT ({stored})) UNION ALL (({stored}) EXCEPT ({_FROM_LEDGER}))"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM ({either_way}) AS difference")
        return int(cursor.fetchone()[0])
