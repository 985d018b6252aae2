"""Who drives a batch: one owner at a time, and a line that has ended is never written again. P71."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from billing import ledger
from billing import selectors as billing_selectors
from billing import services as billing_services
from billing.messages import Settlement
from billing.models import LedgerEntry
from billing.pricing import Terminal, TokenCounts, TokenPrices
from gateway.batches import finalising, ids, leases, services, tasks
from gateway.batches.leases import Answer, Fenced, Lease
from gateway.batches.models import Batch, Line, StoredFile
from gateway.batches.services import NewFile
from tests.gateway.batches.conftest import jsonl, owner_of, request_line

BODY = b'{"usage": {}}'


@pytest.fixture
def batch(books: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Four lines, validated, with nobody driving."""
    monkeypatch.setattr(tasks.settings, "RUBATO_FILES_DIR", str(tmp_path))
    made = make_batch(books, [request_line(str(number)) for number in range(1, 5)])
    tasks.validate_batch(str(made.id))
    yield Batch.objects.get(id=made.id)
    Batch.objects.all().delete()


def make_batch(books: dict[str, str], lines: list[dict[str, Any]]) -> Batch:
    owner, content = owner_of(books["aurora"]), jsonl(*lines)
    with tasks.storage().draft() as draft:
        draft.write(content)
        file = services.keep_file(
            owner=owner,
            file=NewFile(
                storage_name=draft.keep(), filename="in", num_bytes=len(content), purpose="batch", lifetime_s=86_400
            ),
            limit_bytes=1_000_000,
        )
    return services.create_batch(
        owner=owner, endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h"
    )


def take(owner: str = "one") -> Lease:
    (lease,) = leases.take(owner, 10)
    return lease


def run_out(batch: Batch) -> None:
    Batch.objects.filter(id=batch.id).update(leased_until=timezone.now() - timedelta(seconds=1))


def answer(number: int, **changes: Any) -> Answer:
    return Answer(**{"number": number, "status_code": 200, "request_id": "req_1", "body": BODY, **changes})


def test_a_validated_batch_has_its_lines_and_a_second_validation_changes_nothing(batch: Batch) -> None:
    tasks.validate_batch(str(batch.id))
    assert (batch.status, batch.num_lines, batch.model) == ("in_progress", 4, "simulated")
    assert Line.objects.filter(batch=batch).count() == 4


def test_a_batch_has_one_owner_until_its_lease_runs_out(batch: Batch) -> None:
    first = take("one")
    assert leases.take("two", 10) == []
    run_out(batch)
    assert take("two").fencing_token == first.fencing_token + 1


def test_a_lease_that_is_given_back_is_free_at_once(batch: Batch) -> None:
    leases.release(take("one"))
    assert take("two").fencing_token == 2


def test_an_owner_that_was_declared_dead_writes_nothing(batch: Batch) -> None:
    old = take("one")
    run_out(batch)
    take("two")
    (line, *_) = leases.in_doubt(old) or [None]
    assert line is None
    for write in (
        lambda: leases.record(old, [answer(1)]),
        lambda: leases.claim(old, 0, 2),
        lambda: leases.renew(old),
        lambda: leases.close(old, "completed", timezone.now()),
    ):
        with pytest.raises(Fenced):
            write()
    batch.refresh_from_db()
    assert (batch.num_completed, batch.claimed_up_to, batch.status) == (0, 0, "in_progress")
    assert not Line.objects.filter(batch=batch, ended_at__isnull=False).exists()


def test_what_was_claimed_and_has_not_ended_is_in_doubt_for_the_next_owner(batch: Batch) -> None:
    first = take("one")
    assert [line.number for line in leases.claim(first, 0, 3)] == [1, 2, 3]
    leases.record(first, [answer(2)])
    run_out(batch)
    second = take("two")
    assert [line.number for line in leases.in_doubt(second)] == [1, 3]
    assert [line.number for line in leases.claim(second, second.claimed_up_to, 10)] == [4]


def test_an_end_is_written_and_counted_once_however_often_it_comes(batch: Batch) -> None:
    lease = take()
    good = answer(1, input_tokens=7, cached_tokens=2, output_tokens=5)
    leases.record(lease, [good, answer(2, status_code=400)])
    leases.record(lease, [answer(1, body=b'{"other": 1}', input_tokens=9)])
    batch.refresh_from_db()
    assert (batch.num_completed, batch.num_failed) == (1, 1)
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens) == (7, 2, 5)
    assert bytes(Line.objects.get(batch=batch, number=1).answer or b"") == BODY


def test_the_database_itself_refuses_a_second_line_of_one_custom_id(batch: Batch) -> None:
    line = Line.objects.get(batch=batch, number=1)
    line.pk, line.number = None, 99
    with pytest.raises(IntegrityError, match="line_one_per_custom_id"), transaction.atomic():
        line.save(force_insert=True)


def test_the_next_try_of_a_line_is_another_operation_and_the_same_one_for_every_owner(batch: Batch) -> None:
    lease = take()
    (line,) = leases.claim(lease, 0, 1)
    before = ids.response_id(batch.id, line.number, line.num_tries)
    leases.try_again(lease, line)
    run_out(batch)
    (again, *_) = leases.in_doubt(take("two"))
    after = ids.response_id(batch.id, again.number, again.num_tries)
    assert after != before
    assert after == ids.response_id(batch.id, 1, 1)


def test_a_charge_whose_answer_was_lost_is_taken_back_once(batch: Batch) -> None:
    lease = take()
    (line,) = leases.claim(lease, 0, 1)
    operation_id = UUID(ids.response_id(batch.id, 1, 0))
    assert leases.forgive(lease, line) is False  # the books do not know it yet
    ledger.apply([_settlement(operation_id, batch)])
    assert leases.forgive(lease, line) is True
    entries = LedgerEntry.objects.filter(operation_id=operation_id)
    assert sum(entry.amount_micros for entry in entries if entry.kind in ("settle", "adjust")) == 0
    assert (line.num_tries, Line.objects.get(batch=batch, number=1).num_tries) == (1, 1)


def test_what_a_person_took_back_of_a_lost_answer_is_not_taken_back_again(batch: Batch) -> None:
    lease = take()
    (line,) = leases.claim(lease, 0, 1)
    operation_id = UUID(ids.response_id(batch.id, 1, 0))
    dear = TokenPrices(prompt=1_000_000, cached=1_000_000, output=1_000_000)
    prices = billing_services.set_prices(actor="tests", prices={("simulated", "batch"): dear})
    ledger.apply([replace(_settlement(operation_id, batch), price_version=prices.version)])
    charged = billing_selectors.charged_micros(operation_id)
    assert charged == 2_000
    billing_services.adjust(actor="ops", operation_id=operation_id, amount_micros=-charged, reason="by hand")
    assert leases.forgive(lease, line) is True
    assert billing_selectors.charged_micros(operation_id) == 0


def _settlement(operation_id: UUID, batch: Batch) -> Settlement:
    return Settlement(
        operation_id=operation_id,
        attempt=1,
        tenant_id=batch.tenant_id,
        project_id=batch.project_id,
        key_id=batch.key_id,
        priority_class="batch",
        model="simulated",
        counts=TokenCounts(prompt=1_000, output=1_000),
        terminal=Terminal.COMPLETED,
        policy_version=1,
        price_version=1,
    )


@pytest.mark.parametrize("outcome", ["completed", "cancelled", "expired", "failed"])
def test_every_request_stands_in_exactly_one_file_of_a_batch_that_has_ended(batch: Batch, outcome: str) -> None:
    lease = take()
    numbers = range(1, 5) if outcome == "completed" else range(1, 3)
    leases.record(lease, [answer(number, status_code=400 if number == 2 else 200) for number in numbers])
    now = timezone.now()
    if outcome == "cancelled":
        Batch.objects.filter(id=batch.id).update(status="cancelling", cancelling_at=now)
    leases.close(lease, outcome, now)
    tasks.finalise_batch(str(batch.id))
    tasks.finalise_batch(str(batch.id))
    batch.refresh_from_db()
    assert (batch.status, getattr(batch, f"{outcome}_at") is not None) == (outcome, True)
    output, error = (_lines(file_id) for file_id in (batch.output_file_id, batch.error_file_id))
    assert sorted(line["custom_id"] for line in output + error) == ["1", "2", "3", "4"]
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in output)
    codes = {line["custom_id"]: (line["error"] or {}).get("code") for line in error}
    assert codes.pop("2") is None
    assert set(codes.values()) <= {f"batch_{'stopped' if outcome == 'failed' else outcome}"}
    assert not Line.objects.filter(batch=batch).exists()


def _lines(file_id: UUID | None) -> list[dict[str, Any]]:
    file = StoredFile.objects.get(id=file_id)
    assert file.purpose == "batch_output"
    with tasks.storage().open(file.storage_name) as content:
        return [json.loads(line) for line in content]


def test_a_batch_past_its_window_that_nobody_drives_expires_and_its_last_owner_is_fenced(batch: Batch) -> None:
    lease = take()
    later = batch.expires_at + timedelta(seconds=1)
    assert tasks.expire_batches(later) == 0  # its owner will do it
    run_out(batch)
    assert tasks.expire_batches(batch.expires_at - timedelta(seconds=1)) == 0
    assert tasks.expire_batches(later) == 1
    with pytest.raises(Fenced):
        leases.record(lease, [answer(1)])


def test_a_file_that_a_batch_still_reads_is_swept_after_it(books: dict[str, str], batch: Batch) -> None:
    file_id = batch.input_file_id
    services.delete_file(owner=owner_of(books["aurora"]), file_id=file_id)
    place, now = tasks.storage(), timezone.now()
    assert tasks.sweep(place, now) == 0
    leases.close(take(), "expired", now)
    finalising.finalise(Batch.objects.get(id=batch.id), place, now=now)
    assert tasks.sweep(place, now) == 1


def test_a_line_of_an_output_file_is_one_line_for_every_reader_and_the_same_answer(batch: Batch) -> None:
    broken = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\n"
    lease = take()
    body = json.dumps({"text": broken}, ensure_ascii=False).encode()
    leases.record(lease, [answer(number, body=body) for number in range(1, 5)])
    leases.close(lease, "completed", timezone.now())
    tasks.finalise_batch(str(batch.id))
    batch.refresh_from_db()
    file = StoredFile.objects.get(id=batch.output_file_id)
    with tasks.storage().open(file.storage_name) as content:
        lines = content.read().decode().splitlines()
    assert [json.loads(line)["response"]["body"]["text"] for line in lines] == [broken] * 4
