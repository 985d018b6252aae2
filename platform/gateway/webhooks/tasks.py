"""Celery's part: what has happened becomes deliveries, and what is due is sent. Each task may run twice, or late.

What happened is read off the rows themselves, so nothing is told of a change that was rolled back, and nothing that was
committed is forgotten while Celery is away for less than a day.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from gateway.batches import ids
from gateway.batches.models import Batch
from gateway.webhooks.models import Delivery, Endpoint
from gateway.webhooks.sending import Outcome, post
from gateway.webhooks.signing import secret_of, signature
from tenants.models import ApiKey

LOOK_BACK = timedelta(days=1)
BACKOFF_S = (5, 60, 300, 1_800, 7_200, 18_000, 36_000)  # after each try but the last: some 18 h in all
LEASE = timedelta(seconds=120)  # longer than one try, with a slow look-up of the name
AT_ONCE = 8
LONGEST_S = 20.0  # then the next task goes on: a deaf receiver holds no place that batches need
GONE = 410  # the receiver wants no more of it
_ENDED = ("completed", "failed", "expired", "cancelled")
Send = Callable[[str, bytes, dict[str, str]], Outcome]


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def tell() -> int:
    """Returns how many deliveries were tried."""
    announce(timezone.now())
    num_tried, ends_at_s = 0, time.monotonic() + LONGEST_S
    while time.monotonic() < ends_at_s:
        tried = deliver(timezone.now(), _send)
        num_tried += tried
        if tried < AT_ONCE:
            break
    return num_tried


def announce(now: datetime) -> None:
    """A delivery for each endpoint and each thing that happened since it was there; made once."""
    by_tenant: dict[UUID, list[Endpoint]] = defaultdict(list)
    for endpoint in Endpoint.objects.filter(is_active=True):
        by_tenant[endpoint.tenant_id].append(endpoint)
    found = [
        Delivery(tenant_id=tenant_id, endpoint=endpoint, event=event, subject=subject, payload=payload, next_at=now)
        for tenant_id, event, subject, happened_at, payload in _happened(list(by_tenant), now - LOOK_BACK)
        for endpoint in by_tenant[tenant_id]
        if event in endpoint.events and happened_at >= endpoint.created_at
    ]
    Delivery.objects.bulk_create(found, ignore_conflicts=True)


def _happened(tenant_ids: list[UUID], since: datetime) -> Iterator[tuple[UUID, str, str, datetime, dict[str, Any]]]:
    recent = Q()
    for status in _ENDED:
        recent |= Q(**{"status": status, f"{status}_at__gte": since})
    for batch in Batch.objects.filter(recent, tenant_id__in=tenant_ids):
        at: datetime = getattr(batch, f"{batch.status}_at")
        counts = {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed}
        name = ids.shown(ids.BATCH, batch.id)
        event = f"batch.{batch.status}"
        yield batch.tenant_id, event, name, at, _payload(event, at, id=name, request_counts=counts)
    for key in ApiKey.objects.filter(tenant_id__in=tenant_ids, revoked_at__gte=since):
        assert key.revoked_at is not None
        data = {"id": str(key.id), "name": key.name, "revoked_by": key.revoked_by}
        yield key.tenant_id, "key.revoked", str(key.id), key.revoked_at, _payload("key.revoked", key.revoked_at, **data)


def _payload(event: str, at: datetime, **data: Any) -> dict[str, Any]:
    return {"type": event, "timestamp": at.isoformat(), "data": data}


def deliver(now: datetime, send: Send) -> int:
    """Tries what is due, AT_ONCE at most. A try that dies with its process counts, and is made again after LEASE."""
    with transaction.atomic():
        due = Delivery.objects.select_for_update(skip_locked=True, of=("self",)).select_related("endpoint")
        due = due.filter(state="pending", next_at__lte=now, endpoint__is_active=True).order_by("next_at")
        claimed = list(due[:AT_ONCE])
        Delivery.objects.filter(id__in=[one.id for one in claimed]).update(
            num_attempts=F("num_attempts") + 1, next_at=now + LEASE
        )
    if claimed:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            outcomes = pool.map(lambda one: send(*_request(one, now)), claimed)
            for one, outcome in zip(claimed, outcomes, strict=True):
                _settle(one, one.num_attempts + 1, outcome, now)
    return len(claimed)


def _settle(one: Delivery, num_attempts: int, outcome: Outcome, now: datetime) -> None:
    """Unless somebody has sent it once more meanwhile."""
    changes: dict[str, Any] = {"last_status": outcome.status, "last_error": outcome.error}
    if outcome.is_heard:
        changes |= {"state": Delivery.State.DELIVERED}
    elif outcome.status == GONE or num_attempts > len(BACKOFF_S):
        changes |= {"state": Delivery.State.DEAD}
    else:
        changes |= {"next_at": now + timedelta(seconds=BACKOFF_S[num_attempts - 1])}
    Delivery.objects.filter(id=one.id, state="pending", num_attempts=num_attempts).update(**changes)


def _request(one: Delivery, now: datetime) -> tuple[str, bytes, dict[str, str]]:
    endpoint, body = one.endpoint, msgspec.json.encode(one.payload)
    message_id, timestamp_s = f"msg_{one.id.hex}", int(now.timestamp())
    numbers = [endpoint.secret_number]
    if endpoint.previous_until is not None and endpoint.previous_until > now:
        numbers.append(endpoint.secret_number - 1)
    signed = [signature(secret_of(endpoint.id, number), message_id, timestamp_s, body) for number in numbers]
    headers = {
        "content-type": "application/json",
        "user-agent": "Rubato-Webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(signed),
    }
    return endpoint.url, body, headers


def _send(url: str, body: bytes, headers: dict[str, str]) -> Outcome:
    return post(url, body, headers, may_be_private=settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE)
