"""A cancel against all else that moves a batch: it ends as cancelled, or had ended before and is told so. P50."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.utils import timezone

from gateway.batches import leases, services, tasks
from gateway.batches.models import Batch, Line
from gateway.batches.services import WrongState
from tests.gateway.batches.conftest import owner_of, request_line
from tests.gateway.batches.test_leases import answer, make_batch, run_out, take

OUTCOMES = ["completed", "expired", "failed", "cancelled"]


@pytest.fixture
def batch(books: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """Two lines, not yet validated."""
    monkeypatch.setattr(settings, "RUBATO_FILES_DIR", str(tmp_path))
    made = make_batch(books, [request_line("1"), request_line("2")])
    yield Batch.objects.get(id=made.id)
    Batch.objects.all().delete()


@pytest.fixture
def cancel(books: dict[str, str], batch: Batch) -> Callable[[], Batch]:
    return lambda: services.cancel_batch(owner=owner_of(books["aurora"]), batch_id=batch.id)


def elsewhere(work: Callable[[], None]) -> None:
    """Over a connection of its own, while the transaction here goes on."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
        threads.submit(connections.close_all).result()


def ended(batch: Batch) -> Batch:
    tasks.finalise_batch(str(batch.id))
    batch.refresh_from_db()
    return batch


def test_a_batch_cancelled_before_it_is_validated_ends_cancelled_without_lines_and_files(
    batch: Batch, cancel: Callable[[], Batch]
) -> None:
    assert cancel().status == "cancelling"
    tasks.validate_batch(str(batch.id))
    lease = take()
    assert leases.claim(lease, 0, 10) == []
    leases.close(lease, "completed", timezone.now())  # as an owner does where no line is left
    assert ended(batch).status == "cancelled"
    assert (batch.num_lines, batch.output_file_id, batch.error_file_id) == (0, None, None)
    assert batch.completed_at is None


@pytest.mark.parametrize("moment", ["its lines are read", "its owner closes it"])
def test_a_batch_cancelled_in_the_middle_of_its_validation_ends_cancelled_and_leaves_no_line(
    batch: Batch, cancel: Callable[[], Batch], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    insert = tasks._insert

    def meanwhile(*arguments: Any) -> None:
        insert(*arguments)
        cancel()
        if moment == "its owner closes it":
            elsewhere(lambda: leases.close(take(), "completed", timezone.now()))

    monkeypatch.setattr(tasks, "_insert", meanwhile)
    tasks.validate_batch(str(batch.id))
    if moment == "its lines are read":
        leases.close(take(), "completed", timezone.now())
    assert ended(batch).status == "cancelled"
    assert (batch.num_lines, batch.output_file_id, batch.error_file_id) == (0, None, None)
    assert not Line.objects.filter(batch=batch).exists()


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_cancel_that_comes_while_a_batch_is_driven_wins_over_every_other_end(
    batch: Batch, cancel: Callable[[], Batch], outcome: str
) -> None:
    tasks.validate_batch(str(batch.id))
    lease = take()
    leases.record(lease, [answer(1)])
    cancel()
    leases.close(lease, outcome, timezone.now())
    assert ended(batch).status == "cancelled"
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome != "cancelled"])
def test_a_cancel_that_comes_after_the_last_line_changes_nothing_and_says_so(
    batch: Batch, cancel: Callable[[], Batch], outcome: str
) -> None:
    tasks.validate_batch(str(batch.id))
    leases.record(lease := take(), [answer(1), answer(2)])
    leases.close(lease, outcome, timezone.now())
    for _ in range(2):  # before its files are written, and after
        with pytest.raises(WrongState):
            cancel()
        ended(batch)
    assert (batch.status, batch.cancelling_at) == (outcome, None)


@pytest.mark.parametrize("is_validated", [False, True], ids=["validating", "in progress"])
def test_a_cancel_and_the_end_of_the_window_leave_whichever_came_first(
    batch: Batch, cancel: Callable[[], Batch], is_validated: bool
) -> None:
    if is_validated:
        tasks.validate_batch(str(batch.id))
    cancel()
    assert tasks.expire_batches(batch.expires_at) == 0
    leases.close(take(), "expired", timezone.now())
    assert ended(batch).status == "cancelled"


def test_a_batch_whose_window_ended_before_its_validation_has_no_files_and_cannot_be_cancelled(
    batch: Batch, cancel: Callable[[], Batch]
) -> None:
    assert tasks.expire_batches(batch.expires_at) == 1
    with pytest.raises(WrongState):
        cancel()
    tasks.validate_batch(str(batch.id))
    assert ended(batch).status == "expired"
    assert (batch.num_lines, batch.output_file_id, batch.error_file_id) == (0, None, None)


def test_a_cancelled_batch_of_an_owner_that_died_is_closed_by_the_next_as_cancelled(
    batch: Batch, cancel: Callable[[], Batch]
) -> None:
    tasks.validate_batch(str(batch.id))
    take("one")
    cancel()
    run_out(batch)
    leases.close(take("two"), "completed", timezone.now())
    assert ended(batch).status == "cancelled"


@pytest.mark.parametrize("is_validated", [False, True], ids=["validating", "in progress"])
def test_a_cancel_that_is_sent_again_is_answered_with_the_batch_while_it_is_being_cancelled_and_afterwards(
    batch: Batch, cancel: Callable[[], Batch], is_validated: bool
) -> None:
    """As a client does that has missed the first answer: what it asked for has come about."""
    if is_validated:
        tasks.validate_batch(str(batch.id))
    first = cancel()
    assert (cancel().status, cancel().cancelling_at) == ("cancelling", first.cancelling_at)
    leases.close(take(), "completed", timezone.now())
    done = ended(batch)
    assert (cancel().status, cancel().cancelled_at) == ("cancelled", done.cancelled_at)
