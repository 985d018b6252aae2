"""The workers' own totals, kept so that the books can be held against a witness that never wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db import connection

_KEEP = """
INSERT INTO billing_enginecount (worker_id, epoch, prompt_tokens, output_tokens, seen_at)
VALUES (%s, %s, %s, %s, now())
ON CONFLICT (worker_id, epoch) DO UPDATE
SET prompt_tokens = greatest(billing_enginecount.prompt_tokens, excluded.prompt_tokens),
    output_tokens = greatest(billing_enginecount.output_tokens, excluded.output_tokens),
    seen_at = excluded.seen_at
"""


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Tokens of every Usage that one worker committed under one epoch: what the books should say of it."""

    worker_id: str
    epoch: int
    prompt_tokens: int
    output_tokens: int


def keep(totals: Sequence[EngineTotals]) -> None:
    """Remembers the largest totals seen of each epoch; an old snapshot changes nothing."""
    with connection.cursor() as cursor:
        cursor.executemany(_KEEP, [(one.worker_id, one.epoch, one.prompt_tokens, one.output_tokens) for one in totals])
