"""Celery's periodic work: short, idempotent, and never needed for a token to flow."""

from __future__ import annotations

import json

from celery import shared_task
from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string

from tenants import proposals, services
from wire.redis_bus import connect
from wire.redis_keys import Keys


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def publish_policy_if_stale() -> bool:
    """PostgreSQL is the truth: whatever else Redis holds (a publish that failed, an old backup) is replaced."""
    with connect(settings.REDIS_URL) as client:
        held = client.get(Keys(settings.RUBATO_REDIS_PREFIX).policy_current)
    truth = import_string(settings.RUBATO_POLICY_DOCUMENT)()
    if isinstance(held, bytes | str) and json.loads(held) == json.loads(json.dumps(truth)):
        return False
    services.publish_policy()
    return True


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def apply_due_proposals() -> int:
    """Policy edits whose moment has come. Returns how many were looked at."""
    return len(proposals.apply_due(timezone.now()))
