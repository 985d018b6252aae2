"""Celery's part: validation, the files that come out, and looking after what a crash has left. Each task is idempotent.

A message may come twice or never: what a task may do stands in the rows, and beat asks again for what is not done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import datetime
from itertools import islice
from pathlib import Path

from celery import shared_task
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now
from django.utils import timezone

from billing import selectors as billing_selectors
from gateway.batches import finalising, leases
from gateway.batches.models import Batch, Line, StoredFile
from gateway.batches.storage import ContentLost, Storage
from gateway.batches.validation import BadFile, GoodLine, Validator
from gateway.batches.verdicts import not_granted
from gateway.batches.wishes import FINALISE, VALIDATE, ask_for

AT_WORK = ["validating", "in_progress", "finalizing", "cancelling"]
NO_ROW_S = 3_600.0  # content without a row this long belongs to nobody: an upload takes less
_LOCK = 7_270_003  # pg_try_advisory_xact_lock: one task at a time for a batch
INSERTED_AT_ONCE = 2_000
LOOKED_UP_AT_ONCE = 500
_INSERT = """
INSERT INTO batches_line (tenant_id, batch_id, number, custom_id, start, num_bytes, num_tries, request_id)
SELECT %s, %s, number, custom_id, start, num_bytes, 0, ''
FROM unnest(%s::int[], %s::text[], %s::bigint[], %s::int[]) AS line(number, custom_id, start, num_bytes)
"""


def storage() -> Storage:
    return Storage(Path(settings.RUBATO_FILES_DIR))


@shared_task  # type: ignore[untyped-decorator]  # Celery brings no types
def validate_batch(batch_id: str) -> None:
    """validating → in_progress with its lines, or → failed with its errors; all at once."""
    try:
        with _alone(batch_id) as batch:
            if batch is not None and batch.status == Batch.Status.VALIDATING:
                _validate(batch)
    except BadFile as bad:
        now = timezone.now()
        Batch.objects.filter(id=batch_id, status="validating").update(status="failed", failed_at=now, errors=bad.errors)


@shared_task  # type: ignore[untyped-decorator]
def finalise_batch(batch_id: str) -> None:
    """The output and error files of a batch that is no longer driven, and its last status."""
    with _alone(batch_id) as batch:
        if batch is not None and batch.outcome and batch.status in (Batch.Status.FINALIZING, Batch.Status.CANCELLING):
            finalising.finalise(batch, storage(), now=timezone.now())


@shared_task  # type: ignore[untyped-decorator]
def look_after_batches() -> None:
    """Asks again for what is not done, and closes what nobody drives: past its window, or cancelled before it began."""
    expire_batches(timezone.now())
    for batch in Batch.objects.filter(status="validating"):
        ask_for(VALIDATE, batch.id)
    for batch in Batch.objects.filter(status__in=["finalizing", "cancelling"]).exclude(outcome=""):
        ask_for(FINALISE, batch.id)


def expire_batches(now: datetime) -> int:
    """Those that no owner closes in time; a later owner finds a newer fencing token."""
    late = Batch.objects.filter(status__in=["validating", "in_progress"], expires_at__lte=now)
    num_late = 0
    for batch in late.filter(Q(leased_until__isnull=True) | Q(leased_until__lt=Now())):
        num_late += Batch.objects.filter(
            id=batch.id, status=batch.status, fencing_token=batch.fencing_token, outcome=""
        ).update(status="finalizing", finalizing_at=now, outcome="expired", fencing_token=batch.fencing_token + 1)
    return num_late


@shared_task  # type: ignore[untyped-decorator]
def sweep_files() -> None:
    sweep(storage(), timezone.now())


def sweep(place: Storage, now: datetime) -> int:
    """Content of deleted and expired files that no batch reads, and content and drafts of nobody. Returns how many."""
    reading = Batch.objects.filter(input_file_id=OuterRef("id"), status__in=AT_WORK)
    gone = StoredFile.objects.filter(Q(deleted_at__isnull=False) | Q(expires_at__lte=now))
    num_swept = 0
    for file in gone.filter(~Exists(reading)):
        place.remove(file.storage_name)
        file.delete()
        num_swept += 1
    names = place.names_older_than(NO_ROW_S)
    while group := list(islice(names, LOOKED_UP_AT_ONCE)):
        known = set(StoredFile.objects.filter(storage_name__in=group).values_list("storage_name", flat=True))
        for name in set(group) - known:
            place.remove(name)
            num_swept += 1
    place.drop_drafts_older_than(NO_ROW_S)
    return num_swept


@contextmanager
def _alone(batch_id: str) -> Iterator[Batch | None]:
    """One transaction with the batch; None where another task has it: a message that came twice does nothing."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s, hashtext(%s))", [_LOCK, batch_id])
            is_mine = cursor.fetchone()[0]
        yield Batch.objects.filter(id=batch_id).first() if is_mine else None


def _validate(batch: Batch) -> None:
    """Raises BadFile; nothing is written then."""
    validator = Validator(
        endpoint=batch.endpoint,
        models=_models(batch),
        body_limit_bytes=settings.RUBATO_BODY_LIMIT_BYTES,
    )
    file = StoredFile.objects.filter(id=batch.input_file_id, tenant_id=batch.tenant_id).first()
    try:
        if file is None:
            raise ContentLost("its row is gone")
        with storage().open(file.storage_name) as content:
            lines = validator.lines(content)
            while group := list(islice(lines, INSERTED_AT_ONCE)):
                _insert(batch, group)
    except ContentLost as error:
        lost = {"code": "input_file_lost", "message": "The input file is gone.", "param": "input_file_id", "line": None}
        raise BadFile([lost]) from error
    models = validator.models_seen
    begun = Batch.objects.filter(id=batch.id, status="validating").update(
        status="in_progress",
        in_progress_at=timezone.now(),
        num_lines=validator.num_lines,
        model=models.pop() if len(models) == 1 else "",
    )
    if not begun:  # cancelled meanwhile: no line of it will be asked
        Line.objects.filter(batch_id=batch.id).delete()


def _insert(batch: Batch, lines: list[GoodLine]) -> None:
    """COPY would be faster, and is not to be had behind row-level security."""
    columns = [list(column) for column in zip(*map(astuple, lines), strict=True)]
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, [batch.tenant_id, batch.id, *columns])


def _models(batch: Batch) -> frozenset[str]:
    """What the tenant may use in the batch class. Raises BadFile where the class is not granted."""
    if not leases.has_class(batch.tenant_id):
        raise BadFile([not_granted()])
    prices = billing_selectors.price_list(billing_selectors.current_price_version()).prices
    return frozenset(model for model, label in prices if label == "batch")
