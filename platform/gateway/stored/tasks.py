"""What beat runs for stored responses."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from gateway.stored.shelf import sweep


@shared_task  # type: ignore[untyped-decorator]  # celery brings no types
def sweep_responses() -> int:
    return sweep(timezone.now())
