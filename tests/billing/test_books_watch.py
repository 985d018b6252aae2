"""The books compared while traffic runs: right at every moment, and a lost or doubled token is seen."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from django.utils import timezone

from billing import ledger, rollups
from billing.models import LedgerAlert, Rollup
from billing.pricing import Terminal, TokenCounts
from gateway.books_watch import BooksWatch, Comparison
from gateway.gate import Gate
from wire.messages import Released

Settle = Callable[[], None]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watch:
    """A watch that compares whenever it is asked."""

    def __init__(self, gate: Any, every_s: float = 0.0) -> None:
        self.clock = Clock()
        self.inner = BooksWatch(gate, clock_s=self.clock, now=timezone.now, every_s=every_s)

    def look(self) -> Comparison:
        found = self.inner.run()
        assert found is not None
        return found


@pytest.fixture
def watch(gate: Gate) -> Watch:
    return Watch(gate)


def test_usage_that_waits_is_no_difference(floor: Any, watch: Watch, settle: Settle) -> None:
    for turn in range(4):
        floor.busy_hour(random.Random(turn), 10)
        found = watch.look()
        assert (found.is_right, found.num_waiting) == (True, 20)
        settle()
        assert watch.look().is_right


def test_usage_that_was_written_and_not_yet_acknowledged_counts_once(floor: Any, watch: Watch, world: Any) -> None:
    response_id = uuid.UUID(int=5)
    floor.reserve(str(response_id))
    floor.finish(str(response_id), TokenCounts(7, 0, 3))
    same = {"operation_id": response_id, "tenant_id": world.aurora}
    ledger.apply([world.reserve(5, **same), world.usage(5, counts=TokenCounts(7, 0, 3), **same)])
    assert watch.look().is_right


def test_rework_is_charged_to_nobody_and_is_no_difference(floor: Any, watch: Watch, gate: Gate, settle: Settle) -> None:
    response_id = str(uuid.UUID(int=5))
    floor.reserve(response_id)
    gate.end(Released(response_id=response_id, tenant_id=floor.tenant_id, reason="expired"))
    floor.finish(response_id, TokenCounts(7, 0, 3))
    assert watch.look().is_right
    settle()
    assert watch.look().is_right


def test_a_token_that_a_worker_counted_and_the_books_never_got_is_seen(
    floor: Any, watch: Watch, settle: Settle, caplog: pytest.LogCaptureFixture
) -> None:
    floor.busy_hour(random.Random(1), 5)
    floor.client.hincrby(floor.keys.counted("worker-1"), f"{floor.epoch}:output", 3)
    settle()
    found = watch.look()
    assert (found.is_right, found.engine_ledger_output_tokens, found.engine_ledger_prompt_tokens) == (False, 3, 0)
    assert [alert.reason for alert in LedgerAlert.objects.all()] == ["books_differ"]
    assert "the books differ" in caplog.text


def test_a_roll_up_that_was_tampered_with_is_seen(floor: Any, watch: Watch, settle: Settle) -> None:
    floor.reserve(str(uuid.UUID(int=5)))
    floor.finish(str(uuid.UUID(int=5)), TokenCounts(7, 0, 3), Terminal.COMPLETED)
    settle()
    Rollup.objects.update(cost_micros=999)
    assert watch.look().wrong_rollups == 2
    rollups.rebuild()
    assert watch.look().is_right


def test_what_was_found_is_told_for_the_metrics(floor: Any, watch: Watch, gate: Gate) -> None:
    watch.look()
    told = json.loads(floor.client.get(floor.keys.books))
    assert datetime.fromisoformat(told["at"])
    assert (told["engine_ledger_prompt_tokens"], told["wrong_rollups"]) == (0, 0)


def test_it_compares_at_its_time_and_at_once_after_a_worker_has_started(floor: Any, gate: Gate) -> None:
    watch = Watch(gate, every_s=60.0)
    assert watch.inner.run() is not None
    watch.clock.now_s += 59.0
    assert watch.inner.run() is None
    floor.client.hincrby(floor.keys.counted("worker-1"), f"{floor.worker.open()}:output", 0)
    assert watch.inner.run() is not None
    assert watch.inner.run() is None
    watch.clock.now_s += 61.0
    assert watch.inner.run() is not None


def test_a_backlog_that_is_too_long_is_not_compared(floor: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.books_watch.MOST_WAITING", 3)
    floor.busy_hour(random.Random(1), 2)
    assert Watch(gate).inner.run() is None
