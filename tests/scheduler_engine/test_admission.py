"""Promise or refuse: what never fits, what would be late, whose queue is full, and when to come back (cases S121,
S131).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from scheduler_engine.returns import spread
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, Story, World, policy


def reason(world: World, request_id: str) -> RejectReason | None:
    rejected = world.story(request_id).rejected
    return None if rejected is None else rejected.reason


def test_a_request_that_can_never_fit_is_refused_at_once_and_for_good() -> None:
    world = World(64, 8, 512)
    too_big = world.submit(DEFAULT, 2_000, 10)
    at_its_end = world.submit(DEFAULT, 900, 200)
    fits = world.submit(DEFAULT, 700, 200)
    world.run_step()
    assert [reason(world, i) for i in (too_big, at_its_end, fits)] == [RejectReason.NEVER_FITS] * 2 + [None]
    assert world.story(too_big).rejected.retry_after_us is None
    world.finish()


def test_a_prompt_over_the_context_is_refused_and_an_output_over_it_is_cut_there() -> None:
    world = World(64, 8, 512, max_model_len=128)
    over, empty, cut = world.submit(DEFAULT, 128, 1), world.submit(DEFAULT, 0, 1), world.submit(DEFAULT, 120, 100)
    world.finish()
    assert reason(world, over) is reason(world, empty) is RejectReason.CONTEXT_LENGTH
    assert len(world.story(cut).token_ids) == 8


def test_a_class_the_tenant_may_not_use_is_refused() -> None:
    world = World(policy=policy(TenantClassPolicy(tenant_id="Nova", priority_class=INTERACTIVE, allowed=False)))
    refused = world.submit(INTERACTIVE, 10, 1, tenant="Nova")
    welcome = world.submit(INTERACTIVE, 10, 1, tenant="Aurora")
    world.finish()
    assert reason(world, refused) is RejectReason.NOT_ALLOWED
    assert reason(world, welcome) is None


def test_a_second_request_of_the_same_name_is_refused_and_the_first_lives() -> None:
    world = World()
    world.submit(DEFAULT, 10, 30, name="twin")
    world.run_step()
    world.engine.submit(world.story("twin").request, world.now_us)
    plan = world.engine.plan_step(world.now_us)
    assert [row.request_id for row in plan.rows] == ["twin"]
    assert [r.reason for r in world.engine._state.outbox.rejected] == [RejectReason.DUPLICATE]


def test_s121_a_queue_full_of_batch_refuses_no_chat_and_no_other_tenant() -> None:
    world = World(256, 4, 512, max_waiting_per_class=50, max_waiting_per_tenant=40)
    world.many(60, BATCH, 200, 50, tenant="Bulk")
    other = world.submit(BATCH, 200, 50, tenant="Aurora")
    chat = world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.run_step()
    refused = [i for i, story in world.stories.items() if story.rejected is not None]
    assert len(refused) == 20
    assert {reason(world, i) for i in refused} == {RejectReason.CLASS_CLOSED}
    assert all(world.story(i).rejected.retry_after_us for i in refused)
    assert reason(world, other) is None
    assert world.story(chat).first_planned_step == 0


def test_every_refusal_that_may_be_retried_says_when_within_its_bounds_and_spread() -> None:
    world = World(256, 4, 512)
    world.many(3_000, INTERACTIVE, 200, 50, tenant="Nova", hard_deadline_us=1_000_000)
    world.run_step()
    refused = [s.rejected.retry_after_us for s in world.stories.values() if s.rejected is not None]
    assert len(refused) > 2_000
    assert all(hint is not None and 1_000_000 <= hint <= 750_000_000 for hint in refused)
    assert len({spread(wait_us=5_000_000, salt=salt) for salt in range(100)}) > 50
    assert all(5_000_000 <= spread(wait_us=5_000_000, salt=salt) <= 6_250_000 for salt in range(100))


def test_now_or_never_gets_in_when_idle_and_is_refused_when_busy() -> None:
    world = World(256, 2, 512)
    first = world.submit(DEFAULT, 64, 40, max_queue_wait_us=0)
    world.run_step()
    assert world.story(first).first_planned_step == 0
    world.many(5, DEFAULT, 64, 40)
    late = world.submit(DEFAULT, 64, 40, max_queue_wait_us=0)
    world.run_step()
    assert reason(world, late) is RejectReason.QUEUE_WAIT
    world.finish()


def test_who_waits_longer_than_it_allows_is_shed_at_that_moment() -> None:
    world = World(1_000, 1, 512, policy=policy(bypass_limit=0))
    world.submit(DEFAULT, 64, 2_000)
    waiting = world.submit(DEFAULT, 64, 4, max_queue_wait_us=300_000)
    world.run_until(lambda: world.story(waiting).rejected is not None)
    assert reason(world, waiting) is RejectReason.QUEUE_WAIT
    assert 300_000 <= world.now_us <= 320_000


def test_a_preempted_request_is_never_shed_however_late_it_gets() -> None:
    world = World(1_000, 1, 512)
    batch = world.submit(BATCH, 64, 30, max_queue_wait_us=100_000, hard_deadline_us=200_000)
    world.run(4)
    world.submit(INTERACTIVE, 64, 400, tenant="Aurora")
    world.run(300)
    assert world.now_us > 1_000_000
    assert world.board()[batch] == "held"
    world.finish()
    assert len(world.story(batch).token_ids) == 30


def test_an_idle_plan_says_when_its_next_timer_is_due() -> None:
    world = World(1_000, 1, 512, policy=policy(max_queue_wait_ms=None))
    world.submit(DEFAULT, 64, 300)
    world.submit(DEFAULT, 64, 4, max_queue_wait_us=700_000)
    world.run_step()
    assert world.plans[-1].wake_at_us == 700_000
    world.finish()
    assert world.plans[-1].wake_at_us in (None, 700_000)


def beside_seven(hard_deadline_us: int) -> Story:
    """What became of a prompt that takes 8.9 ms alone and 9.1 ms in a step with seven decodes."""
    world = World(1_000, 16, 512)
    world.many(7, INTERACTIVE, 100, 200, tenant="Nova")
    world.run(10)
    tried = world.submit(INTERACTIVE, 64, 4, tenant="Nova", hard_deadline_us=hard_deadline_us)
    world.run_step()
    return world.story(tried)


def test_who_would_be_late_beside_those_already_in_the_step_is_shed_before_its_prompt_is_computed() -> None:
    assert beside_seven(9_400).ttft_us <= 9_400
    late = beside_seven(9_000)
    assert late.rejected is not None
    assert late.rejected.reason is RejectReason.LATE
    assert late.first_planned_step is None


def test_waits_that_ended_in_a_refusal_teach_the_estimates_too() -> None:
    world = World(1_000, 1, 512, policy=policy(bypass_limit=0, fairness_gap_ms=100_000))
    world.teach(DEFAULT, output=4)  # so that nobody expects the first to stay so long
    world.submit(DEFAULT, 64, 2_000)
    world.run(3)

    def estimate_of_the_last_of_twenty() -> int:
        names = world.many(20, DEFAULT, 64, 4, tenant="Aurora", max_queue_wait_us=500_000)
        (accepted,) = [each for each in world.run_step().accepted if each.request_id == names[-1]]
        world.run_until(lambda: all(reason(world, name) is RejectReason.QUEUE_WAIT for name in names))
        return accepted.estimated_start_us

    assert estimate_of_the_last_of_twenty() * 3 // 2 < estimate_of_the_last_of_twenty()


def arrivals(world: World, per_second: int, until_us: int) -> Iterator[None]:
    """Requests at an even rate, each with a deadline of a second, submitted when their moment has come."""
    next_us = 0
    while world.now_us < until_us:
        while next_us <= world.now_us:
            world.submit(INTERACTIVE, 600, 8, tenant="Nova", hard_deadline_us=1_000_000)
            next_us += 1_000_000 // per_second
        yield


def on_time_per_second(per_second: int) -> tuple[float, float]:
    """First tokens in time, and late ones, per second over the last half of 16 s."""
    world = World(4_000, 64, 866, check=False)
    for _ in arrivals(world, per_second, 16_000_000):
        world.run_step()
    firsts = [story for story in world.stories.values() if story.token_us and story.token_us[0] > 8_000_000]
    num_in_time = sum(story.ttft_us <= 1_000_000 for story in firsts)
    return num_in_time / 8, (len(firsts) - num_in_time) / 8


@pytest.mark.parametrize("per_second", [30, 40, 60])
def test_s131_with_two_shedding_points_goodput_stays_at_capacity_in_overload(per_second: int) -> None:
    capacity = 1_000_000 / (600 * 45 + 8 * 70 + 6_000 * 600 / 866)  # requests a second at full steps: 31
    in_time, late = on_time_per_second(per_second)
    assert in_time >= 0.93 * min(per_second, capacity)
    assert late <= 0.05 * in_time


def test_the_load_says_which_class_is_closed_and_for_how_long() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=100))
    assert not any(row.closed for row in world.engine.load(0).classes)
    world.many(4, INTERACTIVE, 40, 50, tenant="Nova")
    world.run_step()
    world.many(100, INTERACTIVE, 400, 50, tenant="Nova")
    world.run_step()
    rows = {row.priority_class: row for row in world.engine.load(world.now_us).classes}
    assert rows[PriorityClass.INTERACTIVE].closed
    assert rows[PriorityClass.INTERACTIVE].retry_after_us >= 1_000_000
    assert rows[PriorityClass.INTERACTIVE].num_waiting > 0
    assert (
        rows[PriorityClass.INTERACTIVE].estimated_start_q50_us <= rows[PriorityClass.INTERACTIVE].estimated_start_q90_us
    )


def test_draining_hands_back_who_waits_and_ends_who_runs() -> None:
    world = World(256, 2, 512)
    requests = world.many(5, DEFAULT, 64, 20)
    world.run(3)
    world.engine.drain()
    late = world.submit(DEFAULT, 64, 20)
    world.finish()
    assert [len(world.story(i).token_ids) for i in requests[:2]] == [20, 20]
    assert {reason(world, i) for i in [*requests[2:], late]} == {RejectReason.DRAINING}
