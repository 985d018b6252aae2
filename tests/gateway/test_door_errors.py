"""The table of refusals: statuses, OpenAI's error shape, and what is said about coming back."""

from __future__ import annotations

import json

import pytest

from gateway.errors import Reason, Refusal, from_reject
from gateway.v1.answers import outcome_of
from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass
from wire.messages import ChoiceEnd, EngineCounters, Finished

COUNTERS = EngineCounters()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_status_and_all_four_keys_of_the_error_object(reason: Reason) -> None:
    refusal = Refusal(reason=reason, message="why")
    error = json.loads(refusal.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 400 <= refusal.status <= 503


@pytest.mark.parametrize("reason", [reason for reason in Reason if Refusal(reason=reason, message="").status == 503])
def test_a_platform_that_is_short_always_says_when_to_come_back_or_that_it_is_no_use(reason: Reason) -> None:
    headers = Refusal(reason=reason, message="why").headers()
    assert headers.get("x-should-retry") == "false" or int(headers["retry-after"]) >= 1


def test_retry_after_is_whole_seconds_rounded_up_and_milliseconds_exactly() -> None:
    headers = Refusal(reason=Reason.OVERLOADED, message="", retry_after_us=2_300_000).headers()
    assert headers == {"retry-after": "3", "retry-after-ms": "2300"}


def test_who_would_wait_longer_than_clients_do_is_told_how_long_and_not_to_come_back_by_itself() -> None:
    headers = Refusal(reason=Reason.OVERLOADED, message="", retry_after_us=900_000_000).headers()
    assert headers == {"retry-after": "900", "retry-after-ms": "900000", "x-should-retry": "false"}
    longest = Refusal(reason=Reason.OVERLOADED, message="", retry_after_us=120_000_000).headers()
    assert longest == {"retry-after": "120", "retry-after-ms": "120000"}


def test_a_deadline_that_no_wait_helps_is_not_worth_another_try() -> None:
    assert Refusal(reason=Reason.DEADLINE, message="").headers() == {"x-should-retry": "false"}
    assert "retry-after" in Refusal(reason=Reason.DEADLINE, message="", retry_after_us=2_000_000).headers()


def test_what_no_waiting_can_help_says_should_not_retry_and_no_retry_after() -> None:
    for reason in (Reason.MONEY, Reason.NEVER_WITHIN_LIMIT, Reason.CLASS_NOT_ALLOWED):
        assert Refusal(reason=reason, message="").headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (RejectReason.NEVER_FITS, 400, "context_length_exceeded"),
        (RejectReason.CONTEXT_LENGTH, 400, "context_length_exceeded"),
        (RejectReason.LATE, 503, "deadline_unreachable"),
        (RejectReason.QUEUE_WAIT, 503, "queue_timeout"),
        (RejectReason.CLASS_CLOSED, 503, "overloaded"),
        (RejectReason.DRAINING, 503, "overloaded"),
        (RejectReason.NOT_ALLOWED, 503, "service_unavailable"),
        ("a reason of a newer worker", 500, "internal_error"),
    ],
)
def test_an_engine_reject_becomes_its_status(reason: str, status: int, code: str) -> None:
    refusal = from_reject(reason, PriorityClass.INTERACTIVE, 1_000_000)
    assert (refusal.status, refusal.row.code) == (status, code)


@pytest.mark.parametrize("reason", [RejectReason.LATE, RejectReason.QUEUE_WAIT, RejectReason.CLASS_CLOSED])
def test_a_batch_request_without_capacity_is_429_resource_unavailable(reason: RejectReason) -> None:
    refusal = from_reject(reason, PriorityClass.BATCH, 5_000_000)
    assert (refusal.status, refusal.row.code, refusal.headers()["retry-after"]) == (429, "resource_unavailable", "5")


@pytest.mark.parametrize("priority_class", list(PriorityClass), ids=lambda one: one.label)
def test_a_deadline_that_no_capacity_would_meet_says_so_in_every_class_and_is_not_worth_another_try(
    priority_class: PriorityClass,
) -> None:
    refusal = from_reject(RejectReason.LATE, priority_class, None)
    assert (refusal.status, refusal.row.code) == (503, "deadline_unreachable")
    assert refusal.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("cancelled", "client")], "cancelled"),
        ([("cancelled", "admin")], "cancelled"),
        ([("cancelled", "draining")], "worker_lost"),
        ([("cancelled", "gateway_lost")], "worker_lost"),
        ([("failed", "")], "generation_failed"),
        ([("failed", "grammar")], "invalid_value"),
        ([("cancelled", "sibling_refused"), ("shed", "late")], "deadline_unreachable"),
    ],
)
def test_an_end_that_nobody_wished_is_the_platforms_and_worth_another_try(
    ends: list[tuple[str, str]], code: str
) -> None:
    choices = tuple(ChoiceEnd(choice=n, reason=reason, detail=detail) for n, (reason, detail) in enumerate(ends))
    finished = Finished(
        response_id="r",
        attempt=1,
        choices=choices,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=0,
        counters=COUNTERS,
    )
    outcome = outcome_of(finished, PriorityClass.DEFAULT)
    assert isinstance(outcome, Refusal)
    assert outcome.row.code == code
    assert ("retry-after" in outcome.headers()) == (code == "worker_lost")
