"""What is promised in time: to the first token, to the last, and to whom a missed promise gives way."""

from __future__ import annotations

from scheduler_engine.events import RejectReason
from scheduler_engine.overload import Rung
from tests.scheduler_engine.world import DEFAULT, INTERACTIVE, World, policy


def test_an_answer_that_cannot_be_whole_in_time_is_refused_before_it_starts_and_costs_nothing() -> None:
    world = World()
    fits = world.submit(DEFAULT, 64, 40, completion_deadline_us=1_000_000)
    hopeless = world.submit(DEFAULT, 64, 400, completion_deadline_us=1_000_000)  # 400 steps of 6 ms at least
    world.finish()
    assert world.story(fits).finished is not None
    rejected = world.story(hopeless).rejected
    assert rejected is not None
    assert rejected.reason is RejectReason.LATE
    assert rejected.retry_after_us is None, "alone on the device it would be late too: coming back cannot help"
    assert world.story(hopeless).first_planned_step is None


def test_an_impossible_wish_is_no_overload() -> None:
    world = World()
    world.many(50, INTERACTIVE, 64, 400, completion_deadline_us=1_000)
    world.run(2)
    assert world.engine.load(world.now_us).policy.rung == Rung.CALM.name.lower()


def test_once_started_a_deadline_for_the_whole_only_orders() -> None:
    world = World(1_000, 1, 512)
    batch_like = world.submit(DEFAULT, 64, 100, completion_deadline_us=900_000)
    world.run(5)
    world.many(3, INTERACTIVE, 64, 100, tenant="Aurora")  # it is held for far longer than it had time
    world.finish()
    assert world.now_us > 900_000
    assert len(world.story(batch_like).token_ids) == 100


def test_the_deadline_for_the_whole_puts_a_long_answer_before_a_short_one() -> None:
    world = World(1_000, 1, 512, policy=policy(ttft_target_ms=None, bypass_limit=0))
    world.submit(DEFAULT, 64, 20)
    world.run(2)
    short = world.submit(DEFAULT, 64, 10, completion_deadline_us=5_000_000)
    long = world.submit(DEFAULT, 64, 500, completion_deadline_us=5_000_000)
    world.run_until(lambda: world.story(short).first_planned_step is not None)
    assert world.story(long).has_ended, "five seconds less 500 steps come before five seconds less 10"


def test_waiting_work_that_has_become_hopeless_ends_at_that_moment_uncharged() -> None:
    world = World(1_000, 1, 512, policy=policy(bypass_limit=0, fairness_gap_ms=100_000))
    world.teach(DEFAULT, output=4)  # so that nobody expects the first to stay so long
    start_us = world.now_us
    world.submit(DEFAULT, 64, 2_000)
    world.run(3)
    waiting = world.submit(DEFAULT, 64, 4, tenant="Aurora", completion_deadline_us=600_000)
    asked_us = world.now_us
    world.run_until(lambda: world.story(waiting).rejected is not None)
    assert 500_000 <= world.now_us - asked_us <= 610_000
    assert world.story(waiting).rejected.reason is RejectReason.LATE
    charged = {account.tenant_id: account.charged for account in world.engine._state.accountant}
    assert charged["Aurora"] == 0
    assert world.now_us > start_us


def in_a_line_of_one_tenant(**fields: int) -> tuple[World, str, str]:
    """A slot taken for longer than the target; one whose target is missed, and one that came late enough to keep it."""
    world = World(1_000, 1, 512, policy=policy(ttft_target_ms=300, fairness_gap_ms=100_000))
    world.submit(INTERACTIVE, 64, 60, tenant="Nova")
    world.run(2)
    missed = world.submit(INTERACTIVE, 64, 4, tenant="Aurora", **fields)
    world.run(46)
    savable = world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.finish()
    return world, missed, savable


def test_a_missed_target_gives_way_to_one_of_its_tenant_that_can_still_be_kept() -> None:
    world, missed, savable = in_a_line_of_one_tenant()
    assert world.story(missed).ttft_us > 300_000
    assert world.story(savable).ttft_us <= 300_000
    assert world.story(savable).first_planned_step < world.story(missed).first_planned_step
    assert world.engine.load(world.now_us).policy.num_relegations == 1


def test_nobody_overtakes_one_that_was_let_in_on_a_hard_deadline() -> None:
    world, missed, savable = in_a_line_of_one_tenant(hard_deadline_us=10_000_000)
    assert world.story(missed).first_planned_step < world.story(savable).first_planned_step


def test_prefills_with_a_hard_deadline_are_not_overtaken_by_a_tenant_that_had_less() -> None:
    world = World(1_000, 8, 128)
    spent = world.submit(INTERACTIVE, 100, 40, tenant="Nova")
    world.run_until(lambda: world.story(spent).has_ended)
    bound = world.submit(INTERACTIVE, 500, 4, tenant="Nova", hard_deadline_us=70_000)
    world.run_step()
    world.many(6, INTERACTIVE, 120, 4, tenant="Aurora")  # served less so far, and enough for six steps
    world.run_until(lambda: bool(world.story(bound).token_ids))
    assert world.story(bound).ttft_us <= 70_000
