"""Usage in buckets: what the ledger says, by time and group, for one tenant alone."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from billing import documents, ledger
from billing.models import LedgerEntry, Rollup, UsageRequest
from billing.pricing import Terminal, TokenCounts
from billing.usage import Bucket, Filter, Group, Sums, Width, buckets, days

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


@pytest.mark.parametrize("width", list(Width))
def test_what_was_not_charged_is_told_apart_from_what_was(world: Any, width: Width) -> None:
    stopped = world.usage(2, terminal=Terminal.EXPIRED, counts=TokenCounts(prompt=7, cached=3, output=5))
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), stopped, world.reserve(3), world.release(3)])
    ended = UsageRequest.objects.get(id=world.operation_id(1)).ended_at
    spans = {"tenant_id": world.aurora, "starts_at": ended, "ends_at": ended + timedelta(minutes=1), "width": width}
    parts = [sums for bucket in buckets(**spans, groups=[Group.CHARGED]) for sums in bucket.parts]
    told = {one.group["is_charged"]: (one.num_requests, one.prompt_tokens, one.cost_micros) for one in parts}
    assert told == {True: (1, 100, 27), False: (1, 7, 0)}
    (both,) = [sums for bucket in buckets(**spans) for sums in bucket.parts]
    assert (both.num_requests, both.prompt_tokens, both.cached_tokens, both.output_tokens) == (2, 107, 3, 25)


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


@pytest.mark.parametrize(
    ("terminal", "counts", "is_charged"),
    [
        (Terminal.COMPLETED, TokenCounts(7, 3, 5), True),
        (Terminal.CANCELLED_CLIENT, TokenCounts(7, 3, 0), True),
        (Terminal.CANCELLED_CLIENT, TokenCounts(), False),
        *((ended, TokenCounts(7, 3, 5), False) for ended in (Terminal.EXPIRED, Terminal.FAILED_PLATFORM)),
    ],
)
def test_an_exported_operation_says_whether_it_is_charged_as_the_ledger_does(
    world: Any, terminal: Terminal, counts: TokenCounts, is_charged: bool
) -> None:
    ledger.apply([world.reserve(1), world.usage(1, terminal=terminal, counts=counts)])
    (line,) = documents.usage_ndjson(UsageRequest.objects.all())
    assert json.loads(line)["is_charged"] == is_charged
    assert LedgerEntry.objects.filter(kind="settle").exists() == is_charged


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


@pytest.mark.parametrize(
    ("zone", "before", "after"),
    [
        ("Europe/Vienna", "2026-11-30T22:00", "2026-11-30T23:00"),
        ("America/New_York", "2026-12-01T04:00", "2026-12-01T05:00"),
        ("Asia/Kolkata", "2026-11-30T18:00", "2026-11-30T19:00"),  # midnight cuts the first: to the day it begins in
        ("UTC", "2026-11-30T23:00", "2026-12-01T00:00"),
    ],
)
def test_days_are_those_of_the_zone_s_calendar(world: Any, zone: str, before: str, after: str) -> None:
    sums(world.aurora, datetime.fromisoformat(before).replace(tzinfo=UTC), 1)
    sums(world.aurora, datetime.fromisoformat(after).replace(tzinfo=UTC), 2)
    first, last = date(2026, 11, 29), date(2026, 12, 1)
    found = days(tenant_id=world.aurora, first=first, last=last, zone=ZoneInfo(zone))
    assert costs(found) == [[], [1], [2]]
    assert [one.starts_at.astimezone(ZoneInfo(zone)).isoformat()[:16] for one in found] == [
        "2026-11-29T00:00",
        "2026-11-30T00:00",
        "2026-12-01T00:00",
    ]


def test_a_day_on_which_clocks_change_is_as_long_as_it_is(world: Any) -> None:
    vienna = ZoneInfo("Europe/Vienna")
    sums(world.aurora, datetime(2026, 10, 25, 22, tzinfo=UTC), 1)  # 23:00 of the day of 25 hours
    found = days(tenant_id=world.aurora, first=date(2026, 10, 24), last=date(2026, 10, 26), zone=vienna)
    assert [(one.ends_at - one.starts_at) // timedelta(hours=1) for one in found] == [24, 25, 24]
    assert costs(found) == [[], [1], []]


def test_more_days_than_one_answer_holds_are_refused(world: Any) -> None:
    with pytest.raises(ValueError, match="at most 366"):
        days(tenant_id=world.aurora, first=date(2025, 1, 1), last=date(2026, 12, 1), zone=ZoneInfo("UTC"))
