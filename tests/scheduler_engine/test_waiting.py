"""Waiting, passing by and coming back (cases S40, S80, and the quantum, the floor and concurrency around them)."""

from __future__ import annotations

from itertools import pairwise

from scheduler_engine.events import Resource
from scheduler_engine.policy import TenantClassPolicy
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def test_s80_a_big_head_is_passed_at_most_eight_times_and_then_starts_within_the_longest_remainder() -> None:
    world = World(256, 8, 512, policy=policy(cap_memory_percent=100))
    holders = world.many(4, DEFAULT, 600, 40, tenant="Aurora")  # 40 blocks each
    world.run(8)
    big = world.submit(DEFAULT, 3_500, 50, tenant="Aurora")  # 222 blocks, 96 are free
    small: list[str] = []
    while world.story(big).first_planned_step is None:
        small += world.many(3, DEFAULT, 64, 20, tenant="Aurora")
        world.run_step()
        assert world.step < 200
    passed = [i for i in small if world.story(i).first_planned_step is not None]
    assert 1 <= len(passed) <= 8
    assert all(world.story(holder).has_ended for holder in holders)
    world.finish()


def test_s40_a_preempted_request_comes_back_only_where_all_of_it_fits() -> None:
    world = World(64, 8, 128)
    requests = [*world.many(2, DEFAULT, 400, 300, tenant="Aurora"), world.submit(BATCH, 600, 200)]
    world.finish()
    for request_id in requests:
        steps = [step for step, preempted in world.story(request_id).preempted if preempted.resource is Resource.MEMORY]
        assert all(later - earlier >= 16 for earlier, later in pairwise(steps))
    assert sum(world.levers().values()) <= 3


def test_nobody_of_a_class_starts_in_the_step_in_which_its_head_was_pushed_out() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100))
    batch = world.many(2, BATCH, 500, 12)
    late = world.submit(BATCH, 20, 4)
    world.run(3)
    world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    assert sum(len(world.story(i).preempted) for i in batch) == 1
    assert world.story(late).first_planned_step is None


def test_what_was_swapped_out_does_not_come_back_in_a_step_that_copies_out() -> None:
    world = World(96, 8, 512)
    world.many(12, BATCH, 400, 40)
    for i in range(60):
        world.run(1)
        if i % 5 == 0:
            world.submit(INTERACTIVE, 100, 6, tenant="Aurora")
    world.finish()
    assert world.levers()["swap"] > 0
    assert not any(plan.swap_out and plan.swap_in for plan in world.plans)


def test_a_tenant_runs_no_more_requests_at_once_than_its_concurrency_and_holds_nobody_up() -> None:
    cell = TenantClassPolicy(tenant_id="Nova", priority_class=DEFAULT, concurrency=2)
    world = World(1_000, 8, 512, policy=policy(cell))
    capped = world.many(6, DEFAULT, 40, 20, tenant="Nova")
    other = world.submit(DEFAULT, 40, 4, tenant="Aurora")
    world.run(2)
    assert world.story(other).first_planned_step == 0
    most = 0
    while world.engine.has_work:
        world.run_step()
        most = max(most, sum(row.tenant_id == "Nova" for row in world.engine.load(0).board))
    assert most == 2
    assert all(len(world.story(i).token_ids) == 20 for i in capped)


def flood(world: World, until_us: int) -> None:
    """Twelve chats of Nova at any time."""
    chats: list[str] = []
    while world.now_us < until_us:
        chats = [chat for chat in chats if not world.story(chat).has_ended]
        chats += world.many(12 - len(chats), INTERACTIVE, 200, 40, tenant="Nova")
        world.run_step()


def test_batch_gets_its_floor_of_device_time_under_an_interactive_flood() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    batch = world.many(40, BATCH, 200, 40)
    flood(world, until_us=60_000_000)
    finished = [story.finished for story in map(world.story, batch) if story.finished is not None]
    spent_us = sum(finished.counters.gpu_us for finished in finished)
    assert 0.03 * 50_000_000 <= spent_us <= 0.08 * 50_000_000  # the first 10 s of the window are credit
    assert world.engine.load(world.now_us).charged_us == world.busy_us


def test_without_a_floor_the_same_flood_starves_batch() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=None, floor_percent=0), check=False)
    batch = world.many(40, BATCH, 200, 40)
    flood(world, until_us=20_000_000)
    assert all(world.story(i).first_planned_step is None for i in batch)


def test_what_comes_free_for_a_class_in_debt_goes_to_the_tenant_that_has_had_least_by_then() -> None:
    world = World(512, 1, policy=policy(bypass_limit=0, max_queue_wait_ms=None))
    world.submit(INTERACTIVE, 16, 1_900, tenant="Aurora")
    world.run_step()
    first, other = world.submit(BATCH, 100, 10, tenant="Bulk"), world.submit(BATCH, 100, 10, tenant="Nova")
    world.run(1_800)
    for gpu_us in (0, 100_000):
        world.engine.set_service_elsewhere(BATCH, "Bulk", gpu_us)
    world.finish()
    started = [world.story(request_id).first_planned_step or 0 for request_id in (other, first)]
    assert 1_800 < started[0] < started[1]


def test_a_cap_on_the_tenant_whose_turn_it_was_keeps_nobody_else_from_what_comes_free() -> None:
    world = World(512, 1, policy=policy(max_queue_wait_ms=None))
    world.submit(INTERACTIVE, 16, 1_900, tenant="Aurora")
    world.run_step()
    first, other = world.submit(BATCH, 100, 10, tenant="Bulk"), world.submit(BATCH, 100, 10, tenant="Nova")
    world.run_until(lambda: world.events[-1].finished != ())
    capped = TenantClassPolicy(tenant_id="Bulk", priority_class=BATCH, concurrency=0)
    world.engine.set_policy(policy(capped, version=2, max_queue_wait_ms=None))
    world.run_step()
    assert [world.story(i).first_planned_step for i in (first, other)] == [None, world.step - 1]


def test_a_full_class_tells_its_wait_once_and_the_tenant_served_least_by_then_starts_next() -> None:
    world = World(1_000, 3)
    world.many(2, BATCH, 16, 300, tenant="Fast")  # two rows in each step
    world.submit(BATCH, 400, 60, tenant="Slow")  # one, after a longer prompt
    world.run(2)
    waiting = {tenant: world.submit(BATCH, 16, 4, tenant=tenant) for tenant in ("Slow", "Fast")}
    world.run(2)
    head = world.engine._state.queues[BATCH].last_head()
    assert head is not None
    assert head.account.tenant_id == "Fast"
    records = []
    while not any(events.finished for events in world.events):
        world.run_step()
        records.append(world.engine.step_records)
    services = dict(world.engine.waiting_services(BATCH))
    assert services["Fast"] > services["Slow"]
    assert not any(records[:-1]), "something was decided while nobody could start"
    world.run_step()
    assert [tenant for tenant, i in waiting.items() if world.story(i).first_planned_step is not None] == ["Slow"]
