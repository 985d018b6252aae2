"""Tenants, refusals and cancels (cases, sections G, H and I)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_engine.events import RejectReason
from scheduler_engine.policy import TenantClassPolicy
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def test_s111_a_thousand_requests_without_a_history_let_the_next_tenant_by_after_one_head() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    flood = world.many(1_000, INTERACTIVE, 100, 10, tenant="Nova")
    single = world.submit(INTERACTIVE, 100, 10, tenant="Aurora")
    world.run_until(lambda: world.story(single).first_planned_step is not None)
    assert sum(world.story(i).first_planned_step is not None for i in flood) <= 4


def test_s112_fairness_between_two_equal_tenants_costs_no_throughput() -> None:
    def finished_us(tenants: tuple[str, ...]) -> int:
        world = World(1_000, 16, 512, policy=policy(max_queue_wait_ms=None), check=False)
        for number in range(200):
            world.submit(DEFAULT, 150 + number, 20, tenant=tenants[number % len(tenants)])
        world.finish()
        return world.now_us

    assert finished_us(("Aurora", "Nova")) <= finished_us(("Aurora",)) / 0.98


def test_s118_long_contexts_and_short_ones_get_the_same_device_time_and_not_the_same_tokens() -> None:
    world = World(6_000, 8, 512, policy=policy(max_queue_wait_ms=None, fairness_gap_ms=200), check=False)
    for _ in range(60):
        world.submit(BATCH, 8_000, 200, tenant="Nova")
    for _ in range(600):
        world.submit(BATCH, 200, 200, tenant="Aurora")
    while world.now_us < 25_000_000:
        world.run_step()
    charged = {account.tenant_id: account.charged for account in world.engine._state.accountant}
    share = charged["Nova"] / sum(charged.values())
    assert 0.45 <= share <= 0.55


def by_policy(world: World) -> str:
    return world.submit(INTERACTIVE, 10, 1, tenant="Nova")


def by_size(world: World) -> str:
    return world.submit(DEFAULT, 600, 10, tenant="Aurora")


def by_context(world: World) -> str:
    return world.submit(DEFAULT, 2_000, 1, tenant="Aurora")


def by_own_line(world: World) -> str:
    world.many(3, DEFAULT, 64, 4, tenant="Aurora")
    return world.submit(DEFAULT, 64, 4, tenant="Aurora")


def by_patience(world: World) -> str:
    world.many(2, DEFAULT, 200, 40, tenant="Aurora")
    return world.submit(DEFAULT, 64, 4, tenant="Aurora", max_queue_wait_us=1_000)


def by_deadline(world: World) -> str:
    world.many(2, DEFAULT, 200, 200, tenant="Aurora")
    return world.submit(DEFAULT, 64, 4, tenant="Aurora", hard_deadline_us=20_000)


def by_draining(world: World) -> str:
    world.engine.drain()
    return world.submit(DEFAULT, 64, 4, tenant="Aurora")


@pytest.mark.parametrize(
    ("ask", "reason", "may_return"),
    [
        (by_policy, RejectReason.NOT_ALLOWED, False),
        (by_size, RejectReason.NEVER_FITS, False),
        (by_context, RejectReason.CONTEXT_LENGTH, False),
        (by_own_line, RejectReason.CLASS_CLOSED, True),
        (by_patience, RejectReason.QUEUE_WAIT, True),
        (by_deadline, RejectReason.LATE, True),
        (by_draining, RejectReason.DRAINING, True),
    ],
)
def test_s123_each_limit_alone_has_its_own_reason_and_its_own_count(
    ask: Callable[[World], str], reason: RejectReason, *, may_return: bool
) -> None:
    forbidden = TenantClassPolicy(tenant_id="Nova", priority_class=INTERACTIVE, allowed=False)
    world = World(32, 1, 512, policy=policy(forbidden), max_model_len=1_000, max_waiting_per_tenant=3)
    world.submit(DEFAULT, 64, 30, tenant="Bulk")
    world.run_step()
    refused = ask(world)
    world.run_step()
    rejected = world.story(refused).rejected
    assert rejected is not None
    assert rejected.reason is reason
    assert (rejected.retry_after_us is not None) == may_return
    counts = {shed.reason: shed.count for shed in world.engine.load(world.now_us).policy.sheds}
    assert counts[reason.value] == 1


def test_s142_a_head_that_is_cancelled_in_the_last_moment_never_enters_a_step() -> None:
    world = World(64, 1, 512)
    running = world.submit(DEFAULT, 64, 5)
    head, next_one = world.submit(DEFAULT, 64, 5), world.submit(DEFAULT, 64, 5)
    world.run_until(lambda: world.story(running).has_ended)
    world.cancel(head)
    world.finish()
    assert world.story(head).first_planned_step is None
    assert world.story(head).finished.prompt_tokens == 0
    assert len(world.story(next_one).token_ids) == 5
