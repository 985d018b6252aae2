"""The workers' own totals, kept so that the books can be held against a witness that never wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from django.db import connection

_KEEP = """
INSERT INTO billing_enginecount AS kept
    (worker_id, epoch, prompt_tokens, output_tokens, rework_prompt_tokens, rework_output_tokens, seen_at)
VALUES (%s, %s, %s, %s, %s, %s, now())
ON CONFLICT (worker_id, epoch) DO UPDATE
SET prompt_tokens = greatest(kept.prompt_tokens, excluded.prompt_tokens),
    output_tokens = greatest(kept.output_tokens, excluded.output_tokens),
    rework_prompt_tokens = greatest(kept.rework_prompt_tokens, excluded.rework_prompt_tokens),
    rework_output_tokens = greatest(kept.rework_output_tokens, excluded.rework_output_tokens),
    seen_at = excluded.seen_at
"""


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Tokens of every Usage that one worker committed under one epoch: what the books should say of it.

    Rework beside them: tokens of responses that had been given up before, which no book charges.
    """

    worker_id: str
    epoch: int
    prompt_tokens: int
    output_tokens: int
    rework_prompt_tokens: int = 0
    rework_output_tokens: int = 0


def keep(totals: Sequence[EngineTotals]) -> None:
    """Remembers the largest totals seen of each epoch; an old snapshot changes nothing."""
    with connection.cursor() as cursor:
        cursor.executemany(_KEEP, [astuple(one) for one in totals])
