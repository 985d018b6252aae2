"""/v1/batches through the official client, with the real worker: from the file to the files that come out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import openai
import pytest
from django.utils import timezone
from openai.types import Batch

from billing.models import OPEN, UsageRequest
from gateway.batches import ids
from gateway.batches.models import Batch as BatchRow
from gateway.batches.models import Line
from tenants import selectors, services
from tenants.models import Project, QuotaPolicy
from tests.gateway.batches.conftest import MODEL, Owners, Platform, create, request_line, until, uuid_of

LONG: dict[str, Any] = {"max_completion_tokens": 2_000, "ignore_eos": True}


def wait(platform: Platform, batch: Batch, *statuses: str, tenant: str = "bulk", timeout_s: float = 90.0) -> Batch:
    deadline = time.monotonic() + timeout_s
    while (batch := platform.client(tenant).batches.retrieve(batch.id)).status not in statuses:
        assert batch.status not in ("completed", "failed", "expired", "cancelled"), batch.errors
        assert time.monotonic() < deadline, (batch.status, batch.request_counts)
        time.sleep(0.1)
    return batch


def results(platform: Platform, file_id: str | None, tenant: str = "bulk") -> dict[str, dict[str, Any]]:
    """Lines of an output or error file by custom_id. Fails where one stands twice."""
    if file_id is None:
        return {}
    rows = [json.loads(line) for line in platform.client(tenant).files.content(file_id).read().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def one_at_a_time(platform: Platform) -> Iterator[None]:
    """Bulk may have one batch request under way."""
    change("bulk", concurrency=1)
    yield
    change("bulk", concurrency=1_024)


def change(slug: str, **limits: Any) -> None:
    """A cell of the quota matrix in the batch class, in force everywhere within a second."""
    row = QuotaPolicy.objects.get(tenant__slug=slug, priority_class="batch")
    for name, value in limits.items():
        setattr(row, name, value)
    services.save_quota(actor="tests", policy=selectors.tenant_class_policy(row))


def test_a_batch_runs_from_its_file_to_its_output(platform: Platform, owners: Owners) -> None:
    made = create(platform, [request_line(f"line {number}") for number in range(20)], metadata={"night": "1"})
    assert (made.status, made.object, made.metadata) == ("validating", "batch", {"night": "1"})
    assert made.expires_at == made.created_at + 86_400
    ended = wait(platform, made, "completed")
    assert ended.request_counts is not None
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert (ended.model, ended.error_file_id, ended.errors) == (MODEL, None, None)
    moments = (ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at)
    assert all(moments)
    assert list(moments) == sorted(moments)
    found = results(platform, ended.output_file_id)
    assert sorted(found) == sorted(f"line {number}" for number in range(20))
    one = found["line 7"]
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    assert one["response"]["request_id"].startswith("req_")
    assert one["response"]["body"]["object"] == "chat.completion"
    assert one["response"]["body"]["service_tier"] == "flex"
    bodies = [row["response"]["body"]["usage"] for row in found.values()]
    assert ended.usage is not None
    assert ended.usage.input_tokens == sum(body["prompt_tokens"] for body in bodies)
    assert ended.usage.output_tokens == sum(body["completion_tokens"] for body in bodies)
    assert ended.usage.total_tokens == ended.usage.input_tokens + ended.usage.output_tokens


@pytest.mark.parametrize(
    ("endpoint", "body", "shape"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 3, "echo": True}, "text_completion"),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 3}, "response"),
    ],
)
def test_other_endpoints_run_in_batches_too(
    platform: Platform, owners: Owners, endpoint: str, body: dict[str, Any], shape: str
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    ended = wait(platform, create(platform, [line], endpoint=endpoint), "completed")
    found = results(platform, ended.output_file_id)["a"]["response"]["body"]
    assert found["object"] == shape
    assert ended.usage is not None
    assert ended.usage.output_tokens == 3


def test_a_line_that_cannot_be_answered_stands_in_the_error_file_and_stops_nobody(
    platform: Platform, owners: Owners
) -> None:
    """What only the model and the tenant's limits tell, no validation sees."""
    alone: dict[str, tuple[dict[str, Any], str]] = {
        "too long": ({"max_completion_tokens": 40_000}, "context_length_exceeded"),
        "no such token": ({"logit_bias": {"999999": 1}}, "invalid_value"),
        "above the most": ({"min_tokens": 9}, "invalid_value"),
    }
    lines = [request_line("good"), *(request_line(name, **changes) for name, (changes, _) in alone.items())]
    ended = wait(platform, create(platform, lines), "completed")
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (1, 3)
    assert set(results(platform, ended.output_file_id)) == {"good"}
    found = {name: bad["response"] for name, bad in results(platform, ended.error_file_id).items()}
    assert {name: bad["status_code"] for name, bad in found.items()} == dict.fromkeys(alone, 400)
    assert {name: bad["body"]["error"]["code"] for name, bad in found.items()} == {
        name: code for name, (_, code) in alone.items()
    }


def test_a_file_with_bad_lines_fails_with_their_numbers_and_costs_nothing(platform: Platform, owners: Owners) -> None:
    lines = [request_line("a"), request_line("a"), request_line("b", model="other")]
    ended = wait(platform, create(platform, lines), "failed")
    assert ended.errors is not None
    assert [(error.line, error.param) for error in ended.errors.data or []] == [(2, "custom_id"), (3, "model")]
    assert ended.failed_at
    assert ended.output_file_id is ended.error_file_id is None


def test_a_cancelled_batch_delivers_what_has_ended_and_stops_the_rest(
    platform: Platform, one_at_a_time: None, owners: Owners
) -> None:
    """P50."""
    lines = [request_line("short")] + [request_line(f"long {number}", **LONG) for number in range(60)]
    made = create(platform, lines)
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).exists())
    cancelling = platform.client("bulk").batches.cancel(made.id)
    assert cancelling.status in ("cancelling", "cancelled")
    ended = wait(platform, made, "cancelled")
    assert ended.cancelling_at
    assert ended.cancelled_at
    output, error = results(platform, ended.output_file_id), results(platform, ended.error_file_id)
    assert set(output) | set(error) == {line["custom_id"] for line in lines}
    assert not set(output) & set(error)
    assert error
    assert {row["error"]["code"] for row in error.values()} == {"batch_cancelled"}
    listed = {file.id for file in platform.client("bulk").files.list(purpose="batch_output")}
    assert {ended.output_file_id, ended.error_file_id} <= listed
    assert made.id in {batch.id for batch in platform.client("bulk").batches.list()}
    with pytest.raises(openai.ConflictError):
        platform.client("bulk").batches.cancel(wait(platform, create(platform, [request_line("a")]), "completed").id)


def test_a_batch_past_its_window_delivers_what_has_ended(
    platform: Platform, one_at_a_time: None, owners: Owners
) -> None:
    lines = [request_line("short")] + [request_line(f"long {number}", **LONG) for number in range(60)]
    made = create(platform, lines)
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).exists())
    owners.now = lambda: timezone.now() + timedelta(hours=25)
    ended = wait(platform, made, "expired")
    output, error = results(platform, ended.output_file_id), results(platform, ended.error_file_id)
    assert set(output) | set(error) == {line["custom_id"] for line in lines}
    assert {row["error"]["code"] for row in error.values()} == {"batch_expired"}
    assert ended.expired_at


def test_what_a_batch_stopped_is_not_charged_and_what_it_delivers_is(
    platform: Platform, one_at_a_time: None, owners: Owners, settle: Callable[[], None]
) -> None:
    lines = [request_line("short")] + [request_line(f"long {number}", **LONG) for number in range(20)]
    made = create(platform, lines)
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).exists())
    platform.client("bulk").batches.cancel(made.id)
    ended = wait(platform, made, "cancelled")
    output = results(platform, ended.output_file_id)
    settle()
    assert output
    charged = UsageRequest.objects.filter(tenant__slug="bulk", cost_micros__gt=0, source="batch")
    answered = {row["response"]["body"]["id"].removeprefix("chatcmpl-") for row in output.values()}
    of_this_batch = {str(operation.id) for operation in charged} & _operations(made, len(lines))
    assert of_this_batch == answered
    assert {operation.priority_class for operation in charged} == {"batch"}


def _operations(made: Batch, count: int) -> set[str]:
    numbers = range(1, count + 1)
    return {ids.response_id(uuid_of(made.id), number, tries) for number in numbers for tries in range(10)}


def test_no_line_fails_because_its_tenant_may_send_no_more_just_now(platform: Platform, owners: Owners) -> None:
    """P04. A limit of one request a second holds for lines too: they wait, and all are answered."""
    change("bulk", requests_per_minute=60)
    try:
        ended = wait(platform, create(platform, [request_line(str(n)) for n in range(61)]), "completed")
    finally:
        change("bulk", requests_per_minute=6_000)
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (61, 0)


def test_a_batch_whose_class_is_taken_away_stops_with_a_clear_error_and_delivers_what_has_ended(
    platform: Platform, one_at_a_time: None, owners: Owners
) -> None:
    made = create(platform, [request_line("short")] + [request_line(f"long {n}", **LONG) for n in range(20)])
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).exists())
    change("bulk", allowed=False)
    try:
        _stopped(platform, made, "service_tier_not_granted")
    finally:
        change("bulk", allowed=True)


def test_a_batch_that_comes_when_its_class_was_taken_away_is_told_so_and_not_that_its_model_is_unknown(
    platform: Platform, owners: Owners
) -> None:
    """In the books alone, which is where validation looks."""
    cells = QuotaPolicy.objects.filter(tenant__slug="bulk", priority_class="batch")
    cells.update(allowed=False)
    try:
        failed = wait(platform, create(platform, [request_line("a"), request_line("b")]), "failed")
    finally:
        cells.update(allowed=True)
    assert failed.errors is not None
    (error,) = failed.errors.data or []
    assert (error.code, error.line) == ("service_tier_not_granted", None)
    assert error.message == "The batch class is not granted to this tenant."


def test_batches_wait_while_an_operator_has_paused_their_class_and_go_on_when_it_is_resumed(
    platform: Platform, one_at_a_time: None, owners: Owners
) -> None:
    begun = create(platform, [request_line(f"line {number}") for number in range(30)])
    of_begun = Line.objects.filter(batch_id=uuid_of(begun.id), ended_at__isnull=False)
    until(of_begun.exists)
    tenant_id = QuotaPolicy.objects.filter(tenant__slug="bulk").values_list("tenant_id", flat=True)[0]
    switch = partial(services.switch_class, actor="tests", tenant_id=tenant_id, label="batch")
    switch(is_paused=True)
    try:
        come_later = wait(platform, create(platform, [request_line("later")]), "in_progress")
        until(lambda: BatchRow.objects.get(id=uuid_of(come_later.id)).claimed_up_to == 1)
        until(lambda: not UsageRequest.objects.filter(tenant_id=tenant_id, state=OPEN).exists())
        assert of_begun.count() < 30
    finally:
        switch(is_paused=False)
    for batch, num_lines in ((begun, 30), (come_later, 1)):
        counts = wait(platform, batch, "completed").request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (num_lines, 0)


@pytest.mark.parametrize("field", ["deadline_ms", "completion_deadline_ms"])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_line_that_comes_too_late_by_its_own_word_ends_with_that_refusal(
    platform: Platform, owners: Owners, field: str, num_choices: int
) -> None:
    late = request_line("late", "a word " * 200, n=num_choices, **{field: 1})
    ended = wait(platform, create(platform, [request_line("good"), late]), "completed")
    assert list(results(platform, ended.output_file_id)) == ["good"]
    told = results(platform, ended.error_file_id)["late"]["response"]
    assert (told["status_code"], told["body"]["error"]["code"]) == (503, "deadline_unreachable")


def test_whoever_comes_right_after_its_class_was_resumed_is_answered_though_the_worker_still_knows_the_pause(
    platform: Platform, owners: Owners
) -> None:
    change("bulk", allowed=False)
    paused = selectors.current_policy()
    assert paused is not None
    until(lambda: {load.policy_version for load in platform.runtime.loads} == {paused.version})
    change("bulk", allowed=True)
    made = create(platform, [request_line("a"), request_line("b")])
    body = request_line("c")["body"]
    assert platform.client("bulk").chat.completions.create(**body, service_tier="flex").choices
    assert len(results(platform, wait(platform, made, "completed").output_file_id)) == 2


def test_a_batch_whose_key_is_revoked_stops_with_a_clear_error(
    platform: Platform, one_at_a_time: None, owners: Owners
) -> None:
    project = Project.objects.get(tenant__slug="bulk")
    second = services.issue_key(actor="tests", project=project, name="second", env="test")
    platform.keys["bulk's second"] = second.text
    lines = [request_line("short")] + [request_line(f"long {n}", **LONG) for n in range(20)]
    made = create(platform, lines, tenant="bulk's second")
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).exists())
    services.revoke_key(actor="tests", key_id=second.key.id)
    _stopped(platform, made, "invalid_api_key")


def _stopped(platform: Platform, made: Batch, code: str) -> None:
    ended = wait(platform, made, "failed")
    assert ended.errors is not None
    assert [error.code for error in ended.errors.data or []] == [code]
    output, error = results(platform, ended.output_file_id), results(platform, ended.error_file_id)
    assert "short" in output
    assert {row["error"]["code"] for row in error.values()} == {"batch_stopped"}
    assert len(output) + len(error) == 21


def test_another_owner_goes_on_where_one_left_off_and_no_line_is_computed_twice(
    platform: Platform, owners: Owners, settle: Callable[[], None]
) -> None:
    """P71."""
    lines = [request_line(str(n), max_completion_tokens=100, ignore_eos=True) for n in range(60)]
    made = create(platform, lines)
    until(lambda: Line.objects.filter(batch_id=uuid_of(made.id), ended_at__isnull=False).count() > 5)
    owners.stop()
    assert platform.client("bulk").batches.retrieve(made.id).status == "in_progress"
    owners.start()
    owners.start()
    ended = wait(platform, made, "completed")
    found = results(platform, ended.output_file_id)
    assert len(found) == len(lines)
    settle()
    charged = UsageRequest.objects.filter(source="batch", output_tokens__gt=0, cost_micros__gt=0)
    of_this_batch = [one for one in charged if str(one.id) in _operations(made, len(lines))]
    assert len(of_this_batch) == len(lines)
    assert ended.usage is not None
    assert sum(one.output_tokens for one in of_this_batch) == ended.usage.output_tokens == 100 * len(lines)


def test_an_output_file_may_be_given_a_shorter_life(platform: Platform, owners: Owners) -> None:
    lifetime = {"anchor": "created_at", "seconds": 3_600}
    made = create(platform, [request_line("a")], output_expires_after=lifetime)
    ended = wait(platform, made, "completed")
    assert ended.output_file_id is not None
    file = platform.client("bulk").files.retrieve(ended.output_file_id)
    assert file.expires_at == file.created_at + 3_600
    assert file.purpose == "batch_output"


def test_a_line_is_counted_and_charged_like_the_same_request_alone(
    platform: Platform, owners: Owners, settle: Callable[[], None]
) -> None:
    """P11. Other words of the same length, so that neither finds the other's prefix in the cache."""
    line = request_line("a", "ten of clubs", max_completion_tokens=7, ignore_eos=True)
    other = request_line("a", "six of spoon", max_completion_tokens=7, ignore_eos=True)
    alone = platform.client("bulk").chat.completions.create(**_arguments(other["body"]))
    ended = wait(platform, create(platform, [line]), "completed")
    body = results(platform, ended.output_file_id)["a"]["response"]["body"]
    assert alone.usage is not None
    assert body["usage"] == alone.usage.model_dump(exclude_none=True)
    settle()
    rows = [UsageRequest.objects.get(id=answer.removeprefix("chatcmpl-")) for answer in (alone.id, body["id"])]
    first, second = [(one.prompt_tokens, one.output_tokens, one.cost_micros, one.priority_class) for one in rows]
    assert first == second
    assert [one.source for one in rows] == ["rest", "batch"]


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in body.items() if name != "ignore_eos"}
    return {**own, "service_tier": "flex", "extra_body": {"ignore_eos": body["ignore_eos"]}}
