"""What a tenant changes: files kept and deleted, batches made and cancelled. One transaction each, behind the wall.

Refuses to know HTTP and content: a file's content lies on disk before its row is written, and goes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import Sum
from django.db.models.functions import Greatest
from django.utils import timezone

from gateway.batches import selectors
from gateway.batches.models import Batch, StoredFile
from tenants.counting import count_alone
from tenants.isolation import ALIAS, tenant

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # what a batch may address
DAY_S = 86_400
FILE_LIFETIME_S = 30 * DAY_S
WINDOWS_S = {"24h": DAY_S}
OPEN = ("validating", "in_progress", "cancelling", "finalizing")  # a batch that has not ended
LEAST_BYTES = 4_096  # what an empty file counts for: a disk gives no less


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """In whose name: the tenant, the project and the key of a call."""

    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    key_public_id: str

    @property
    def actor(self) -> str:
        return f"key:{self.key_public_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """Content that lies on disk already."""

    storage_name: str
    filename: str
    num_bytes: int
    purpose: str
    lifetime_s: int


class TenantStorageFull(Exception):
    """The tenant's files together may not be larger."""


class TooManyOpenBatches(Exception):
    """As many of the tenant's batches as may be have not ended yet."""


class SentBefore(Exception):
    """The form of this ``form_id`` has made its batch."""

    def __init__(self, made: Batch) -> None:
        super().__init__(f"batch {made.id}")
        self.made = made


class NoSuchObject(Exception):
    """Unknown, somebody else's, deleted or expired: all the same to the one who asks."""


class WrongState(Exception):
    """The batch is past that; the text says what it is."""


def keep_file(*, owner: Owner, file: NewFile, limit_bytes: int, now: datetime | None = None) -> StoredFile:
    """Raises TenantStorageFull."""
    moment = now or timezone.now()
    with tenant(owner.tenant_id):
        count_alone(owner.tenant_id)
        if stored_bytes() + max(LEAST_BYTES, file.num_bytes) > limit_bytes:
            raise TenantStorageFull(f"the files of this tenant may have {limit_bytes} bytes together")
        row = StoredFile(
            tenant_id=owner.tenant_id,
            project_id=owner.project_id,
            purpose=file.purpose,
            filename=file.filename,
            num_bytes=file.num_bytes,
            storage_name=file.storage_name,
            created_by=owner.actor,
            created_at=moment,
            expires_at=moment + timedelta(seconds=file.lifetime_s),
        )
        row.save(using=ALIAS, force_insert=True)
    return row


def stored_bytes() -> int:
    """What the tenant in force keeps, or has deleted and is not swept yet."""
    found = StoredFile.objects.using(ALIAS).aggregate(sum=Sum(Greatest("num_bytes", LEAST_BYTES)))
    return int(found["sum"] or 0)


def delete_file(*, owner: Owner, file_id: UUID, now: datetime | None = None) -> None:
    """Raises NoSuchObject. The content goes with the next sweep, and not before a batch that reads it has ended."""
    moment = now or timezone.now()
    with tenant(owner.tenant_id):
        if not selectors.live_files(moment).filter(id=file_id).update(deleted_at=moment):
            raise NoSuchObject


def create_batch(
    *,
    owner: Owner,
    endpoint: str,
    input_file_id: UUID,
    completion_window: str,
    output_lifetime_s: int = FILE_LIFETIME_S,
    metadata: Mapping[str, str] | None = None,
    most_open: int | None = None,
    form_id: UUID | None = None,
    now: datetime | None = None,
) -> Batch:
    """A batch to be validated. Raises NoSuchObject where the file is none of the tenant's input files, and
    TooManyOpenBatches where ``most_open`` have not ended, and SentBefore where there is one of this ``form_id``.
    """
    moment = now or timezone.now()
    with tenant(owner.tenant_id):
        if form_id is not None:
            count_alone(owner.tenant_id)
            if made := Batch.objects.using(ALIAS).filter(form_id=form_id).first():
                raise SentBefore(made)
        if most_open is not None:
            count_alone(owner.tenant_id)
            if Batch.objects.using(ALIAS).filter(status__in=OPEN).count() >= most_open:
                raise TooManyOpenBatches
        if not selectors.live_files(moment).filter(id=input_file_id, purpose="batch").exists():
            raise NoSuchObject
        batch = Batch(
            tenant_id=owner.tenant_id,
            project_id=owner.project_id,
            key_id=owner.key_id,
            key_public_id=owner.key_public_id,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            output_lifetime_s=output_lifetime_s,
            metadata=None if metadata is None else dict(metadata),
            form_id=form_id,
            created_at=moment,
            expires_at=moment + timedelta(seconds=WINDOWS_S[completion_window]),
        )
        batch.save(using=ALIAS, force_insert=True)
    return batch


def cancel_batch(*, owner: Owner, batch_id: UUID, now: datetime | None = None) -> Batch:
    """What has finished stays. Raises NoSuchObject, and WrongState where it cannot be cancelled any more."""
    with tenant(owner.tenant_id):
        rows = Batch.objects.using(ALIAS).filter(id=batch_id)
        rows.filter(status__in=["validating", "in_progress"]).update(
            status=Batch.Status.CANCELLING, cancelling_at=now or timezone.now()
        )
        batch = rows.first()
        if batch is None:
            raise NoSuchObject
        if batch.status not in ("cancelling", "cancelled"):
            raise WrongState(f"Cannot cancel a batch with status '{batch.status}'.")
    return batch
