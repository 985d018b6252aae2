"""What a tenant changes: its endpoints, the lines it wants to be told of, and a delivery that is sent once more."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID, uuid4

from django.conf import settings
from django.core.exceptions import ValidationError
from django.utils import timezone

from gateway.webhooks.models import EVENTS, OPERATORS_EVENTS, Delivery, Endpoint, Threshold
from gateway.webhooks.sending import ForbiddenAddress, check_url
from tenants.audit import change_by
from tenants.checks import checked_by_the_database
from tenants.counting import count_alone
from tenants.isolation import alias
from tenants.models import Tenant
from tenants.refusals import StillGood

MOST = 10
MOST_THRESHOLDS = 50
OVERLAP = timedelta(days=1)


def events_for(tenant: Tenant) -> tuple[str, ...]:
    """What it can be told of: the books of the whole platform are the operators' business."""
    return (*EVENTS, *OPERATORS_EVENTS) if tenant.slug == settings.RUBATO_OPERATOR_TENANT else EVENTS


def add(*, actor: str, tenant: Tenant, url: str, events: Sequence[str], endpoint_id: UUID | None = None) -> Endpoint:
    """Raises ValidationError, also where there is an endpoint of this ``endpoint_id``."""
    try:
        check_url(url, may_be_private=settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE)
    except ForbiddenAddress as error:
        raise ValidationError({"url": str(error)}) from error
    offered = events_for(tenant)
    if not events or not set(events) <= set(offered):
        raise ValidationError({"events": f"choose from {', '.join(offered)}"})
    with change_by(actor):
        count_alone(tenant.id)
        if Endpoint.objects.filter(tenant=tenant).count() >= MOST:
            raise ValidationError({"url": f"a tenant has at most {MOST} endpoints"})
        wanted = [event for event in offered if event in events]
        made = Endpoint(id=endpoint_id or uuid4(), tenant=tenant, url=url, events=wanted, created_by=actor)
        with checked_by_the_database(Endpoint, alias()):
            made.save(force_insert=True)
        return made


def rotate(*, actor: str, endpoint_id: UUID, seen: int | None = None, end_previous: bool = False) -> bool:
    """A new secret; for a day both sign. False where there is no such endpoint, or not with the secret ``seen``. Raises
    StillGood while the secret before the last rotation signs, which ``end_previous`` ends now.
    """
    with change_by(actor):
        found = Endpoint.objects.select_for_update().filter(id=endpoint_id).first()
        if found is None or seen not in (None, found.secret_number):
            return False
        if not end_previous and (until := found.previous_good_until):
            otherwise = "rotate again then, or say expressly that it ends now"
            raise StillGood("the secret before the last rotation", until, otherwise)
        found.secret_number, found.previous_until = found.secret_number + 1, timezone.now() + OVERLAP
        found.save(update_fields=["secret_number", "previous_until"])
    return True


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


def draw(*, actor: str, tenant: Tenant, priority_class: str, measure: str, amount: int) -> Threshold:
    """A new line. Raises ValidationError."""
    made = Threshold(tenant=tenant, priority_class=priority_class, measure=measure, amount=amount, created_by=actor)
    if measure == Threshold.Measure.MONEY and not 1 <= amount <= 100:
        raise ValidationError({"amount": "a percentage of the budget lies between 1 and 100"})
    with change_by(actor):
        count_alone(tenant.id)
        mine = Threshold.objects.filter(tenant=tenant)
        if mine.count() >= MOST_THRESHOLDS:
            raise ValidationError({"amount": f"a tenant has at most {MOST_THRESHOLDS} of them"})
        if mine.filter(priority_class=priority_class, measure=measure, amount=amount).exists():
            raise ValidationError({"amount": "this one is there already"})
        made.full_clean(exclude=["tenant"], validate_unique=False, validate_constraints=False)
        with checked_by_the_database(Threshold, alias()):
            made.save(force_insert=True)
    return made


def wipe(*, actor: str, threshold_id: UUID) -> bool:
    """False where there is no such line."""
    with change_by(actor):
        return bool(Threshold.objects.filter(id=threshold_id).delete()[0])
