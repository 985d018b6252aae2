"""What each refusal means for a line: it waits, or it has ended."""

from __future__ import annotations

import pytest

from gateway.batches.asking_lines import Reply
from gateway.batches.verdicts import MAX_FAILURES, Again, Done, verdict
from gateway.errors import Reason, Refusal, from_reject
from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass

BROKEN = (Reason.FAILED, Reason.INTERNAL)
PERMANENT = (  # of those that a line's request can meet
    *(Reason.INVALID_REQUEST, Reason.INVALID_TYPE, Reason.INVALID_VALUE, Reason.MISSING_PARAMETER),
    *(Reason.UNKNOWN_PARAMETER, Reason.UNSUPPORTED_PARAMETER, Reason.CONTEXT_LENGTH, Reason.MODEL_NOT_FOUND),
    *(Reason.NEVER_WITHIN_LIMIT, Reason.CANCELLED),
)
PASSING = (
    *(Reason.REQUESTS_PER_MINUTE, Reason.TOKENS_PER_MINUTE, Reason.CONCURRENCY, Reason.MONEY),
    *(Reason.CAPACITY, Reason.OVERLOADED, Reason.NO_WORKER, Reason.UNAVAILABLE, Reason.WORKER_LOST),
    Reason.CLASS_NOT_ALLOWED,  # paused; where the class was taken away, the owner of the batch sees that itself
)


def reply(refusal: Refusal, *, is_too_late: bool = False) -> Reply:
    return Reply(
        status=refusal.status,
        headers=refusal.headers(),
        body=refusal.body(),
        request_id="req_1",
        is_too_late=is_too_late,
    )


def of(reason: Reason, num_failures: int = 0) -> object:
    return verdict(reply(Refusal(reason=reason, message="why")), num_failures)


@pytest.mark.parametrize("reason", PERMANENT)
def test_what_no_waiting_can_help_ends_the_line(reason: Reason) -> None:
    assert of(reason) == Done()


@pytest.mark.parametrize("reason", PASSING)
def test_what_passes_never_ends_a_line(reason: Reason) -> None:
    assert isinstance(of(reason, 1_000), Again)


@pytest.mark.parametrize("reason", BROKEN)
def test_what_the_platform_broke_is_tried_again_and_ends_the_line_at_the_third_time(reason: Reason) -> None:
    assert [type(of(reason, number)) for number in (1, MAX_FAILURES - 1, MAX_FAILURES)] == [Again, Again, Done]


@pytest.mark.parametrize("reject", RejectReason)
def test_a_worker_ends_a_line_only_for_what_is_in_it(reject: RejectReason) -> None:
    found = verdict(reply(from_reject(reject, PriorityClass.BATCH, None)), 1)
    is_in_the_line = reject in (RejectReason.NEVER_FITS, RejectReason.CONTEXT_LENGTH, RejectReason.GRAMMAR)
    assert type(found) is (Done if is_in_the_line else Again)


@pytest.mark.parametrize("reject", [RejectReason.LATE, RejectReason.QUEUE_WAIT])
def test_a_line_that_missed_a_time_of_its_own_has_ended(reject: RejectReason) -> None:
    refusal = from_reject(reject, PriorityClass.BATCH, 1_000_000)
    assert verdict(reply(refusal, is_too_late=True), 0) == Done()
