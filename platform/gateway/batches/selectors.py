"""What a tenant sees of its files and batches. Reads only, inside ``tenants.isolation.tenant``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar
from uuid import UUID

from django.db.models import Q, QuerySet

from gateway.batches.models import Batch, StoredFile
from tenants.isolation import ALIAS, tenant

Row = TypeVar("Row", StoredFile, Batch)


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and whether more follow."""

    rows: Sequence[Row]
    has_more: bool


def live_files(now: datetime) -> QuerySet[StoredFile]:
    """Neither deleted nor expired; of the tenant in force."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
    return StoredFile.objects.using(ALIAS).filter(unexpired, deleted_at__isnull=True)


def file(tenant_id: UUID, file_id: UUID, now: datetime) -> StoredFile | None:
    with tenant(tenant_id):
        return live_files(now).filter(id=file_id).first()


def files(
    tenant_id: UUID, now: datetime, *, limit: int, after: UUID | None, newest_first: bool, purpose: str | None
) -> Page[StoredFile]:
    with tenant(tenant_id):
        rows = live_files(now)
        return _page(rows if purpose is None else rows.filter(purpose=purpose), limit, after, newest_first)


def batch(tenant_id: UUID, batch_id: UUID) -> Batch | None:
    with tenant(tenant_id):
        return Batch.objects.using(ALIAS).filter(id=batch_id).first()


def newest_batches(*, limit: int, after: UUID | None) -> Page[Batch]:
    """Of the tenant in force."""
    return _page(Batch.objects.using(ALIAS).all(), limit, after, newest_first=True)


def batches(tenant_id: UUID, *, limit: int, after: UUID | None) -> Page[Batch]:
    with tenant(tenant_id):
        return newest_batches(limit=limit, after=after)


def _page(rows: QuerySet[Row], limit: int, after: UUID | None, newest_first: bool) -> Page[Row]:
    """``after`` is a place in the order of ids; whether such an object exists is nobody's business."""
    if after is not None:
        rows = rows.filter(id__lt=after) if newest_first else rows.filter(id__gt=after)
    found = list(rows.order_by("-id" if newest_first else "id")[: limit + 1])
    return Page(found[:limit], len(found) > limit)
