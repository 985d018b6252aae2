"""The files that come out of a batch: each request of the input file stands in exactly one of them, once.

Knows the form of output lines; refuses to know how an answer was made.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from gateway.batches import ids
from gateway.batches.models import Batch, Line, StoredFile
from gateway.batches.storage import Draft, Storage

CHUNK = 500
ACTOR = "finalise_batch"
_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    "failed": ("batch_stopped", "This request was not executed: the batch was stopped."),
}
_encode = msgspec.json.Encoder().encode


def finalise(batch: Batch, storage: Storage, *, now: datetime) -> None:
    """Writes the files and the last status. The caller's transaction holds the batch; content without one is swept."""
    with ExitStack() as stack:
        good, bad = _Output(stack, storage), _Output(stack, storage)
        for line in Line.objects.filter(batch_id=batch.id).order_by("number").iterator(CHUNK):
            output = good if line.status_code == 200 else bad
            output.write(output_line(batch, line))
        changes: dict[str, Any] = {"status": batch.outcome, f"{batch.outcome}_at": now}
        ended = Batch.objects.filter(id=batch.id, outcome=batch.outcome, status=batch.status)
        if not ended.update(
            output_file_id=good.keep(batch, "output", now), error_file_id=bad.keep(batch, "error", now), **changes
        ):
            raise AssertionError("a batch with an outcome is changed by nobody else")
        Line.objects.filter(batch_id=batch.id).delete()


def output_line(batch: Batch, line: Line) -> bytes:
    """One line of an output or error file, with its end."""
    operation = UUID(ids.response_id(batch.id, line.number, line.num_tries))
    row: dict[str, Any] = {"id": ids.shown(ids.LINE, operation), "custom_id": line.custom_id}
    if line.answer is None:
        code, message = _NOT_RUN[batch.outcome]
        row |= {"response": None, "error": {"code": code, "message": message}}
    else:
        body = msgspec.Raw(bytes(line.answer))
        row |= {
            "response": {"status_code": line.status_code, "request_id": line.request_id, "body": body},
            "error": None,
        }
    return _on_one_line(_encode(row)) + b"\n"


def _on_one_line(row: bytes) -> bytes:
    """JSON lets three characters stand in its texts at which many a reader of lines breaks one; written by number they
    are the same to a reader of JSON.
    """
    for character in "\x85\u2028\u2029":
        row = row.replace(character.encode(), b"\\u%04x" % ord(character))
    return row


class _Output:
    """A file that is made with its first line."""

    def __init__(self, stack: ExitStack, storage: Storage) -> None:
        self._stack = stack
        self._storage = storage
        self._draft: Draft | None = None

    def write(self, line: bytes) -> None:
        if self._draft is None:
            self._draft = self._stack.enter_context(self._storage.draft())
        self._draft.write(line)

    def keep(self, batch: Batch, kind: str, now: datetime) -> UUID | None:
        """Its id, or None where there was nothing to write."""
        if self._draft is None:
            return None
        file = StoredFile(
            tenant_id=batch.tenant_id,
            project_id=batch.project_id,
            purpose=StoredFile.Purpose.BATCH_OUTPUT,
            filename=f"{ids.shown(ids.BATCH, batch.id)}_{kind}.jsonl",
            num_bytes=self._draft.num_bytes,
            storage_name=self._draft.keep(),
            created_by=ACTOR,
            created_at=now,
            expires_at=now + timedelta(seconds=batch.output_lifetime_s),
        )
        file.save(force_insert=True)
        return file.id
