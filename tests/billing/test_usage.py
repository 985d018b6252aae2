"""Usage in buckets: what the ledger says, by time and group, for one tenant alone."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing import documents, ledger
from billing.models import Rollup, UsageRequest
from billing.usage import Bucket, Filter, Group, Sums, Width, buckets

DAY = datetime(2026, 11, 29, tzinfo=UTC)


def sums(tenant_id: uuid.UUID, hour: datetime, cost: int, **place: Any) -> None:
    key = {"project_id": uuid.UUID(int=1), "key_id": uuid.UUID(int=2), "priority_class": "default", "model": "m"}
    counts = {"num_requests": 1, "prompt_tokens": 5, "cached_tokens": 1, "output_tokens": 3}
    Rollup.objects.create(tenant_id=tenant_id, hour=hour, cost_micros=cost, **{**key, **place}, **counts)


def costs(found: list[Bucket[Sums]]) -> list[list[int]]:
    return [[one.cost_micros for one in bucket.parts] for bucket in found]


def test_days_hold_the_sums_of_their_hours_and_empty_days_stand_empty(world: Any) -> None:
    for hours, cost in ((0, 1), (23, 2), (48, 4)):
        sums(world.aurora, DAY + timedelta(hours=hours), cost)
    found = buckets(tenant_id=world.aurora, starts_at=DAY, ends_at=DAY + timedelta(days=3), width=Width.DAY)
    assert costs(found) == [[3], [], [4]]
    assert [bucket.starts_at for bucket in found] == [DAY + timedelta(days=count) for count in range(3)]


def test_the_first_bucket_is_the_one_that_holds_the_start(world: Any) -> None:
    sums(world.aurora, DAY + timedelta(hours=2), 1)
    start = DAY + timedelta(hours=2, minutes=59)
    found = buckets(tenant_id=world.aurora, starts_at=start, ends_at=start + timedelta(minutes=2), width=Width.HOUR)
    assert costs(found) == [[1], []]


def test_minutes_are_read_from_the_ledger(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), world.release(2)])
    ended = UsageRequest.objects.get(id=world.operation_id(1)).ended_at
    found = buckets(
        tenant_id=world.aurora,
        starts_at=ended - timedelta(minutes=1),
        ends_at=ended + timedelta(minutes=1),
        width=Width.MINUTE,
    )
    assert [[(one.num_requests, one.cost_micros) for one in bucket.parts] for bucket in found[:2]] == [[], [(1, 27)]]


@pytest.mark.parametrize("width", list(Width))
def test_downgraded_requests_are_counted_beside_the_class_that_served_them(world: Any, width: Width) -> None:  # P37
    down = {"priority_class": "batch", "requested_class": "default"}
    for number, classes in ((1, down), (2, down), (3, {"priority_class": "batch"})):
        ledger.apply([world.reserve(number, **classes), world.usage(number, **classes)])
    ended = UsageRequest.objects.get(id=world.operation_id(1)).ended_at
    spans = {"tenant_id": world.aurora, "starts_at": ended, "ends_at": ended + timedelta(minutes=1), "width": width}
    (one,) = [sums for bucket in buckets(**spans, groups=[Group.CLASS]) for sums in bucket.parts]
    assert (one.group, one.num_requests, one.num_downgraded) == ({"priority_class": "batch"}, 3, 2)


def test_groups_tell_sums_apart_and_filters_leave_others_out(world: Any) -> None:
    sums(world.aurora, DAY, 1, priority_class="batch")
    sums(world.aurora, DAY, 2, priority_class="default")
    sums(world.aurora, DAY, 4, priority_class="default", model="n")
    asked = {"tenant_id": world.aurora, "starts_at": DAY, "ends_at": DAY + timedelta(days=1), "width": Width.DAY}
    (by_class,) = buckets(**asked, groups=[Group.CLASS])
    assert [(one.group["priority_class"], one.cost_micros) for one in by_class.parts] == [("batch", 1), ("default", 6)]
    assert costs(buckets(**asked, only=Filter(models=["m"], classes=["default"]))) == [[2]]


def test_another_tenants_usage_is_never_in_it(world: Any) -> None:
    sums(world.bulk, DAY, 9)
    found = buckets(tenant_id=world.aurora, starts_at=DAY, ends_at=DAY + timedelta(days=1), width=Width.DAY)
    assert costs(found) == [[]]


def test_more_buckets_than_an_answer_holds_are_refused(world: Any) -> None:
    with pytest.raises(ValueError, match="169 buckets of a hour were asked for; one answer has at most 168"):
        buckets(tenant_id=world.aurora, starts_at=DAY, ends_at=DAY + timedelta(hours=169), width=Width.HOUR)


def test_ninety_days_are_one_query(world: Any, django_assert_num_queries: Any) -> None:  # P76
    with django_assert_num_queries(1):
        buckets(tenant_id=world.aurora, starts_at=DAY, ends_at=DAY + timedelta(days=90), width=Width.DAY)


def test_an_operation_is_exported_the_same_in_each_format(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    found = list(UsageRequest.objects.all())
    header, row = (line.strip().split(",") for line in documents.usage_csv(found))
    as_csv = dict(zip(header, row, strict=True))
    (as_json,) = (json.loads(line) for line in documents.usage_ndjson(found))
    (event,) = (json.loads(line) for line in documents.usage_cloudevents(found, source="rubato/test"))
    assert as_csv["cost_micros"] == "27" == str(as_json["cost_micros"])
    assert event["data"] == as_json
    assert (event["id"], event["subject"], event["specversion"]) == (as_json["id"], str(world.aurora), "1.0")
