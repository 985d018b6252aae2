"""Hourly sums: equal to the ledger, whatever happens to them."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from billing import ledger, rollups, selectors
from billing.models import Rollup
from billing.pricing import Terminal, TokenCounts
from billing.rollups import CountedEnd


def test_roll_ups_are_apart_by_tenant_class_and_model(world: Any) -> None:
    for number, change in enumerate(
        [{}, {"tenant_id": world.bulk}, {"priority_class": "batch"}, {"model": "another"}, {}]
    ):
        ledger.apply([world.reserve(number, **change), world.usage(number, **change)])
    assert sorted(Rollup.objects.values_list("num_requests", flat=True)) == [1, 1, 1, 2]


def test_roll_ups_are_apart_by_project_and_key(world: Any) -> None:
    others = [{}, {"project_id": uuid.UUID(int=7)}, {"key_id": uuid.UUID(int=8)}, {}]
    for number, change in enumerate(others):
        ledger.apply([world.reserve(number, **change), world.usage(number, **change)])
    assert sorted(Rollup.objects.values_list("num_requests", flat=True)) == [1, 1, 2]
    assert rollups.num_wrong_rows() == 0


def test_rebuilding_since_an_hour_leaves_the_hours_before_it_alone(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    Rollup.objects.update(output_tokens=7)
    later = Rollup.objects.get().hour + timedelta(hours=1)
    rollups.rebuild(since=later)
    assert (Rollup.objects.get().output_tokens, rollups.num_wrong_rows(since=later)) == (7, 0)
    rollups.rebuild(since=later - timedelta(minutes=1))
    assert Rollup.objects.get().output_tokens == 20


def test_what_was_used_and_not_charged_has_a_row_of_its_own_also_when_made_anew(world: Any) -> None:
    """A settle and a release of one hour and place."""
    stopped = world.usage(2, terminal=Terminal.EXPIRED, counts=TokenCounts(prompt=7, output=5))
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), stopped])
    expected = [(True, 100, 20, 27), (False, 7, 5, 0)]
    for _ in range(2):
        rows = Rollup.objects.order_by("-is_charged")
        assert list(rows.values_list("is_charged", "prompt_tokens", "output_tokens", "cost_micros")) == expected
        assert rollups.num_wrong_rows() == 0
        rollups.rebuild()


def test_roll_ups_of_an_installation_of_before_are_made_anew(transactional_db: None, world: Any) -> None:
    """One row held both; the migration goes either way."""
    stopped = world.usage(2, terminal=Terminal.EXPIRED, counts=TokenCounts(prompt=7, output=5))
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), stopped])
    before, after = [("billing", "0011_corrections_by_tenant")], MigrationExecutor(connections["owner"]).loader.graph
    try:
        MigrationExecutor(connections["owner"]).migrate(before)
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT prompt_tokens, output_tokens, cost_micros FROM billing_rollup")
            assert cursor.fetchall() == [(107, 25, 27)]
    finally:
        MigrationExecutor(connections["owner"]).migrate(after.leaf_nodes("billing"))
    assert (Rollup.objects.count(), rollups.num_wrong_rows()) == (2, 0)


def test_roll_ups_are_apart_by_hour(world: Any) -> None:
    end = CountedEnd(
        tenant_id=world.aurora,
        project_id=None,
        key_id=None,
        priority_class="default",
        model="m",
        is_charged=True,
        created_at=datetime(2026, 11, 29, 10, 59, 59, 999_999, tzinfo=UTC),
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=2,
        cost_micros=3,
    )
    rollups.add([end, replace(end, created_at=datetime(2026, 11, 29, 11, 0, tzinfo=UTC))])
    hours = Rollup.objects.order_by("hour").values_list("hour", flat=True)
    assert [hour.hour for hour in hours] == [10, 11]


def test_nothing_to_add_adds_nothing(world: Any) -> None:
    rollups.add([])
    assert not Rollup.objects.exists()


def test_a_wrong_row_is_found_and_rebuilding_mends_it(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), world.usage(2)])
    Rollup.objects.update(output_tokens=7)
    assert rollups.num_wrong_rows() > 0
    rollups.rebuild()
    assert rollups.num_wrong_rows() == 0
    assert selectors.rollup_sums() == selectors.ledger_sums()


def test_a_release_that_no_worker_counted_is_in_no_roll_up(world: Any) -> None:
    ledger.apply([world.reserve(1), world.release(1)])
    assert not Rollup.objects.exists()
    assert selectors.ledger_sums().num_requests == 0
