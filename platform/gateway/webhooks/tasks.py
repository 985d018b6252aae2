"""Celery's part: what has happened becomes deliveries, and what is due is sent. Each task may run twice, or late.

What happened is read off the rows themselves, so nothing is told of a change that was rolled back, and nothing that was
committed is forgotten while Celery is away for less than a day.
"""

from __future__ import annotations

import functools
import logging
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

from billing.models import LedgerAlert
from gateway.batches import ids
from gateway.batches.models import Batch
from gateway.gate import Gate
from gateway.webhooks import alerts
from gateway.webhooks.models import Alert, Delivery, Endpoint
from gateway.webhooks.sending import Outcome, post
from gateway.webhooks.signing import secret_of, signature
from tenants import selectors
from tenants.models import ApiKey, PolicyVersion, Tenant
from tenants.policy_changes import diff
from wire.bus import BusError
from wire.redis_keys import Keys

log = logging.getLogger(__name__)

LOOK_BACK = timedelta(days=1)
BACKOFF_S = (5, 60, 300, 1_800, 7_200, 18_000, 36_000)  # after each try but the last: some 18 h in all
LEASE = timedelta(seconds=120)  # longer than one try, with a slow look-up of the name
AT_ONCE = 8
LONGEST_S = 20.0  # then the next task goes on: a deaf receiver holds no place that batches need
GONE = 410  # the receiver wants no more of it
_ENDED = ("completed", "failed", "expired", "cancelled")
MOST_VERSIONS = 100
MOST_FINDINGS = 100
Happened = tuple[UUID, str, str, datetime, dict[str, Any]]  # tenant, event, subject, when, payload
Send = Callable[[str, bytes, dict[str, str]], Outcome]


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def tell() -> int:
    """Returns how many deliveries were tried."""
    try:
        with Gate(settings.REDIS_URL, Keys(settings.RUBATO_REDIS_PREFIX)) as gate:
            alerts.find(timezone.now(), gate)
    except BusError as error:  # the next turn sees the same lines crossed
        log.warning("no alerts are looked for: %s", error)
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


def _happened(tenant_ids: list[UUID], since: datetime) -> Iterator[Happened]:
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
    for alert in Alert.objects.filter(tenant_id__in=tenant_ids, happened_at__gte=since):
        payload = _payload(alert.event, alert.happened_at, **alert.data)
        yield alert.tenant_id, alert.event, alert.subject, alert.happened_at, payload
    yield from _of_the_policy(tenant_ids, since)
    yield from _of_the_books(tenant_ids, since)


def _of_the_policy(tenant_ids: list[UUID], since: datetime) -> Iterator[Happened]:
    """What a version changed for a tenant: its own cells, and the classes that are everybody's."""
    versions = PolicyVersion.objects.filter(created_at__gte=since).values_list("version", "created_at")
    for version, at in versions[:MOST_VERSIONS]:
        changes = changes_of(version, at)
        for tenant_id in tenant_ids:
            mine = [change for place in ("class", str(tenant_id)) for change in changes.get(place, ())]
            if mine:
                payload = _payload("policy.changed", at, version=version, changes=mine)
                yield tenant_id, "policy.changed", f"version {version}", at, payload


@functools.lru_cache(maxsize=MOST_VERSIONS)
def changes_of(version: int, at: datetime) -> dict[str, list[dict[str, Any]]]:
    """By tenant id, or ``class``. A version never changes, so neither does this; its moment keeps databases apart."""
    before, after = selectors.policy_at(version - 1), selectors.policy_at(version)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for change in diff(before.policy, after.policy) if before and after else ():
        of, _, label = change.place.partition(" ")
        found[of].append({"class": label, "field": change.field, "before": change.before, "after": change.after})
    return dict(found)


def _of_the_books(tenant_ids: list[UUID], since: datetime) -> Iterator[Happened]:
    """Told to the operators' own tenant alone: a finding may be about anybody's requests."""
    operators = Tenant.objects.filter(id__in=tenant_ids, slug=settings.RUBATO_OPERATOR_TENANT or None).first()
    if operators is not None:
        for one in LedgerAlert.objects.filter(created_at__gte=since)[:MOST_FINDINGS]:
            data = {"id": str(one.id), "subject": one.subject, "reason": one.reason, "detail": one.detail[:500]}
            payload = _payload("reconcile.mismatch", one.created_at, **data)
            yield operators.id, "reconcile.mismatch", str(one.id), one.created_at, payload


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
