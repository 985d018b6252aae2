"""Who drives a batch, and what its owner writes: lines claimed, answers recorded, the end. As app_ops, for all tenants.

Exactly once stands here: every write carries the owner's fencing token and holds the batch's row, so that an owner who
was declared dead writes nothing, and a line that has ended is never written again. Leases run by the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Now

from billing import selectors as billing_selectors
from billing import services as billing_services
from billing.models import OPEN, UsageRequest
from gateway.batches import ids
from gateway.batches.models import Batch, Line, StoredFile
from tenants.models import QuotaPolicy

LEASE = timedelta(seconds=15)
ACTOR = "run_batches"
DRIVEN = ["in_progress", "cancelling"]


class Fenced(Exception):
    """Another owner has this batch: drop it and write nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A batch that this process drives, as it stood when it was taken."""

    batch_id: UUID
    fencing_token: int
    tenant_id: UUID
    project_id: UUID
    key_id: UUID
    key_public_id: str
    endpoint: str
    storage_name: str  # of the input file; empty where its row is gone
    expires_at: datetime
    claimed_up_to: int


@dataclass(slots=True)
class OpenLine:
    """A line that has not ended. ``num_tries``: operations of it that ended without an answer."""

    number: int
    custom_id: str
    start: int
    num_bytes: int
    num_tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a line ended: the status and body of what its endpoint answered."""

    number: int
    status_code: int
    request_id: str
    body: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_good(self) -> bool:
        return self.status_code == 200


def take(owner: str, limit: int) -> list[Lease]:
    """Batches that nobody drives, oldest first, each under a new fencing token."""
    free = Q(leased_until__isnull=True) | Q(leased_until__lt=Now())
    with transaction.atomic():
        rows = Batch.objects.select_for_update(skip_locked=True).filter(free, status__in=DRIVEN, outcome="")
        found = [row.id for row in rows.order_by("created_at", "id")[:limit]]
        taken = Batch.objects.filter(id__in=found)
        taken.update(fencing_token=F("fencing_token") + 1, owner=owner, leased_until=Now() + LEASE)
        batches = list(taken.order_by("created_at", "id"))
        names = dict(
            StoredFile.objects.filter(id__in=[batch.input_file_id for batch in batches]).values_list(
                "id", "storage_name"
            )
        )
        return [_lease(batch, names.get(batch.input_file_id, "")) for batch in batches]


def _lease(batch: Batch, storage_name: str) -> Lease:
    return Lease(
        batch_id=batch.id,
        fencing_token=batch.fencing_token,
        tenant_id=batch.tenant_id,
        project_id=batch.project_id,
        key_id=batch.key_id,
        key_public_id=batch.key_public_id,
        endpoint=batch.endpoint,
        storage_name=storage_name,
        expires_at=batch.expires_at,
        claimed_up_to=batch.claimed_up_to,
    )


def renew(lease: Lease) -> str:
    """Keeps the batch for another while; returns its status, which a cancel changes. Raises Fenced."""
    with _held(lease, leased_until=Now() + LEASE):
        return str(Batch.objects.values_list("status", flat=True).get(id=lease.batch_id))


def has_class(tenant_id: UUID) -> bool:
    """Whether the tenant may run batches: now, or when an operator ends the pause of the class."""
    cells = QuotaPolicy.objects.filter(tenant_id=tenant_id, priority_class="batch")
    return cells.filter(Q(allowed=True) | Q(is_paused=True)).exists()


def release(lease: Lease) -> None:
    """Another owner may take it at once. Nothing where it is another's already."""
    Batch.objects.filter(id=lease.batch_id, fencing_token=lease.fencing_token).update(owner="", leased_until=None)


def in_doubt(lease: Lease) -> list[OpenLine]:
    """Lines that an earlier owner may have sent on their way, and whose end nobody has written down."""
    return _open_lines(Line.objects.filter(batch_id=lease.batch_id, number__lte=lease.claimed_up_to))


def claim(lease: Lease, after: int, count: int) -> list[OpenLine]:
    """The next lines beyond number ``after``; from now on they may be under way. Raises Fenced."""
    lines = _open_lines(Line.objects.filter(batch_id=lease.batch_id, number__gt=after), count)
    if lines:
        with _held(lease, claimed_up_to=lines[-1].number):
            pass
    return lines


def _open_lines(rows: Any, count: int | None = None) -> list[OpenLine]:
    fields = ("number", "custom_id", "start", "num_bytes", "num_tries")
    return [OpenLine(*values) for values in rows.filter(ended_at=None).order_by("number").values_list(*fields)[:count]]


def try_again(lease: Lease, line: OpenLine) -> None:
    """Its operation ended without an answer; the next try is another operation. Raises Fenced."""
    with _held(lease):
        Line.objects.filter(
            batch_id=lease.batch_id, number=line.number, num_tries=line.num_tries, ended_at=None
        ).update(num_tries=line.num_tries + 1)
    line.num_tries += 1


def forgive(lease: Lease, line: OpenLine) -> bool:
    """Its operation was charged and its answer is nowhere: a counter-entry takes the charge back, and the next try is
    another operation. False while the books do not know the charge yet. Raises Fenced.
    """
    operation_id = UUID(ids.response_id(lease.batch_id, line.number, line.num_tries))
    with _held(lease):
        operation = UsageRequest.objects.filter(id=operation_id).exclude(state=OPEN).first()
        if operation is None:
            return False
        if charged := max(0, billing_selectors.charged_micros(operation_id) or 0):
            billing_services.adjust(
                actor=ACTOR, operation_id=operation_id, amount_micros=-charged, reason="batch answer lost"
            )
        try_again(lease, line)
    return True


_END = """
UPDATE batches_line AS line
SET status_code = ended.status_code, request_id = ended.request_id, answer = ended.body, ended_at = now()
FROM unnest(%s::int[], %s::int[], %s::text[], %s::bytea[]) AS ended(number, status_code, request_id, body)
WHERE line.batch_id = %s AND line.number = ended.number AND line.ended_at IS NULL
RETURNING line.number
"""


def record(lease: Lease, answers: Sequence[Answer]) -> None:
    """Writes ends, and the batch's counts with them; an end that stands is left alone. Raises Fenced."""
    with _held(lease):
        columns = [
            [getattr(answer, name) for answer in answers] for name in ("number", "status_code", "request_id", "body")
        ]
        with connection.cursor() as cursor:
            cursor.execute(_END, [*columns, lease.batch_id])
            new = {number for (number,) in cursor.fetchall()}
        ended = [answer for answer in answers if answer.number in new]
        good = [answer for answer in ended if answer.is_good]
        Batch.objects.filter(id=lease.batch_id).update(
            num_completed=F("num_completed") + len(good),
            num_failed=F("num_failed") + len(ended) - len(good),
            input_tokens=F("input_tokens") + sum(answer.input_tokens for answer in good),
            cached_tokens=F("cached_tokens") + sum(answer.cached_tokens for answer in good),
            output_tokens=F("output_tokens") + sum(answer.output_tokens for answer in good),
        )


def close(lease: Lease, outcome: str, now: datetime, errors: Sequence[dict[str, Any]] = ()) -> None:
    """No line is driven any more: its files can be written. Raises Fenced.

    A cancel that came before wins over every other outcome, and shows as cancelling until the files are there.
    """
    decided = Case(When(status="cancelling", then=Value("cancelled")), default=Value(outcome))
    with _held(lease, outcome=decided, errors=list(errors), owner="", leased_until=None):
        Batch.objects.filter(id=lease.batch_id, status="in_progress").update(status="finalizing", finalizing_at=now)


@contextmanager
def _held(lease: Lease, **changes: Any) -> Iterator[None]:
    """One transaction in which no other owner can take the batch. Raises Fenced."""
    with transaction.atomic():
        mine = Batch.objects.filter(id=lease.batch_id, fencing_token=lease.fencing_token, outcome="")
        if not mine.update(**(changes or {"fencing_token": lease.fencing_token})):
            raise Fenced(f"batch {lease.batch_id} has another owner")
        yield
