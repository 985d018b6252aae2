"""Celery's part of the books: closing days. Short, idempotent, never needed for a token to flow."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from billing import statements


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def close_statements() -> int:
    """Every day that is over, of every tenant. Returns how many statements were made."""
    return len(statements.close_due_days(timezone.now()))
