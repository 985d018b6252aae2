"""What a tenant changes of its endpoints: added, rotated, switched off, removed; and a delivery sent once more."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db.models import F
from django.utils import timezone

from gateway.webhooks.models import EVENTS, Delivery, Endpoint
from gateway.webhooks.sending import ForbiddenAddress, check_url
from tenants.audit import change_by
from tenants.models import Tenant

MOST = 10
OVERLAP = timedelta(days=1)


def add(*, actor: str, tenant: Tenant, url: str, events: Sequence[str]) -> Endpoint:
    """Raises ValidationError."""
    try:
        check_url(url, may_be_private=settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE)
    except ForbiddenAddress as error:
        raise ValidationError({"url": str(error)}) from error
    if not events or not set(events) <= set(EVENTS):
        raise ValidationError({"events": f"choose from {', '.join(EVENTS)}"})
    with change_by(actor):
        if Endpoint.objects.filter(tenant=tenant).count() >= MOST:
            raise ValidationError({"url": f"a tenant has at most {MOST} endpoints"})
        wanted = [event for event in EVENTS if event in events]
        return Endpoint.objects.create(tenant=tenant, url=url, events=wanted, created_by=actor)


def rotate(*, actor: str, endpoint_id: UUID) -> bool:
    """A new secret; for a day both sign. False where there is no such endpoint."""
    with change_by(actor):
        found = Endpoint.objects.filter(id=endpoint_id)
        until = timezone.now() + OVERLAP
        return bool(found.update(secret_number=F("secret_number") + 1, previous_until=until))


def switch(*, actor: str, endpoint_id: UUID, is_active: bool) -> bool:
    """Off: nothing new is told, and what is on its way waits."""
    with change_by(actor):
        return bool(Endpoint.objects.filter(id=endpoint_id).update(is_active=is_active))


def remove(*, actor: str, endpoint_id: UUID) -> bool:
    """With everything that was to be told to it."""
    with change_by(actor):
        return bool(Endpoint.objects.filter(id=endpoint_id).delete()[0])


def replay(*, actor: str, delivery_id: UUID) -> bool:
    """From the first try on, under the same id. False for one that is on its way, or not there."""
    with change_by(actor):
        ended = Delivery.objects.filter(id=delivery_id).exclude(state=Delivery.State.PENDING)
        return bool(ended.update(state=Delivery.State.PENDING, num_attempts=0, next_at=timezone.now()))
