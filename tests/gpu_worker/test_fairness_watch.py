"""What a worker tells of its tenants and of the gap between them."""

from __future__ import annotations

from typing import Any

from gpu_worker.clock import VirtualClock
from gpu_worker.telling.fairness_watch import bounded
from scheduler_engine.load import TenantLoad
from scheduler_engine.policy import PriorityClass


def load(tenant_id: str, *gpu_us: int, num_live: int = 0) -> TenantLoad:
    return TenantLoad(tenant_id, gpu_us, weight=2 * bool(num_live), num_live=num_live)


def test_tenants_beyond_the_bound_add_up_under_no_name() -> None:
    rows = bounded([load("a", 1, 2, 3), load("b", 10, 0, 0, num_live=1), load("c", 0, 5, 0, num_live=2)], most=1)

    assert [row.tenant_id for row in rows] == ["a", ""]
    assert rows[1].gpu_us == (10, 5, 0)
    assert (rows[1].weight, rows[1].num_live) == (4, 3)


def test_a_tenant_that_was_named_stays_named_when_others_come() -> None:
    before = bounded([load("a", 1, 0, 0), load("b", 1, 0, 0)], most=2)
    after = bounded([load("a", 1, 0, 0), load("b", 1, 0, 0), load("c", 900, 0, 0)], most=2)

    assert [row.tenant_id for row in after[:2]] == [row.tenant_id for row in before]


def test_the_device_time_of_all_tenants_is_the_busy_time(small_worker: Any) -> None:
    clock = VirtualClock()
    loop = small_worker.loop(clock)
    for number, tenant_id in enumerate(("aurora", "bulk", "nova")):
        loop.take_in(small_worker.submit(f"r{number}", tenant_id=tenant_id, max_tokens=9), clock.now_us())
    while loop.has_work:
        loop.turn()
    clock.sleep_us(2_000_000)

    snapshot = loop.snapshot()

    assert [row.tenant_id for row in snapshot.tenants] == ["aurora", "bulk", "nova"]
    in_all_us = sum(sum(row.gpu_us) for row in snapshot.tenants)
    assert 0 < snapshot.busy_us_total - 3 < in_all_us <= snapshot.busy_us_total
    assert {row.num_live for row in snapshot.tenants} == {0}


def test_tenants_are_read_once_a_second_at_most(small_worker: Any) -> None:
    clock = VirtualClock()
    loop = small_worker.loop(clock)
    loop.snapshot()
    loop.take_in(small_worker.submit(tenant_id="aurora", max_tokens=500), clock.now_us())
    loop.turn()

    assert loop.snapshot().tenants == ()
    clock.sleep_us(1_000_000)
    assert [row.tenant_id for row in loop.snapshot().tenants] == ["aurora"]


def test_a_gap_is_told_with_what_it_cannot_pass(small_worker: Any) -> None:
    """S160: beside each other per class, not one number for all."""
    clock = VirtualClock()
    loop = small_worker.loop(clock)
    for number in range(60):
        tenant_id = "nova" if number % 4 else "aurora"
        loop.take_in(
            small_worker.submit(f"r{number}", tenant_id=tenant_id, priority_class=PriorityClass.BATCH, max_tokens=50),
            clock.now_us(),
        )
    for _ in range(60):
        loop.turn()
    clock.sleep_us(1_000_000)

    rows = loop.snapshot().classes
    assert 0 < rows[PriorityClass.BATCH].fairness_gap_us <= rows[PriorityClass.BATCH].fairness_bound_us
    assert rows[PriorityClass.INTERACTIVE].fairness_gap_us == 0
