"""Tenants inside a class share device time, whatever the shape of their requests (case S110)."""

from __future__ import annotations

import pytest

from scheduler_engine.events import Resource
from scheduler_engine.policy import TenantClassPolicy
from tests.scheduler_engine.world import BATCH, INTERACTIVE, World, policy


def backlog(world: World, tenant: str, prompt: int, output: int, *, at_least: int) -> None:
    """Keep ``at_least`` requests of a tenant unfinished."""
    alive = sum(not s.has_ended for s in world.stories.values() if s.request.tenant_id == tenant)
    for _ in range(at_least - alive):
        world.submit(INTERACTIVE, prompt, output, tenant=tenant)


def service_us(world: World) -> dict[str, int]:
    return {account.tenant_id: us for account, us in world.engine._state.accountant.charges_us().items()}


def run_two(world: World, until_us: int) -> list[int]:
    """Aurora with long requests and Nova with short ones, both always waiting; the gap of their service after each
    step.
    """
    gaps = []
    while world.now_us < until_us:
        if world.step % 8 == 0:
            backlog(world, "Aurora", 4_000, 500, at_least=10)
            backlog(world, "Nova", 50, 20, at_least=60)
            world.stories = {i: story for i, story in world.stories.items() if not story.has_ended}
        world.run_step()
        served = service_us(world)
        gaps.append(served.get("Aurora", 0) - served.get("Nova", 0))
    return gaps


def test_s110_two_backlogged_tenants_get_equal_device_time_within_twice_the_bound() -> None:
    world = World(2_000, 16, 512, policy=policy(max_queue_wait_ms=None), check=False)
    gaps = run_two(world, 40_000_000)
    longest_step_us = max(world.duration_us(plan) for plan in world.plans)
    gap_us, quantum, slots = 1_000_000, 16, 16
    bound_us = gap_us + (quantum + slots + 1) * longest_step_us
    assert max(gaps) - min(gaps) <= 2 * bound_us
    assert max(map(abs, gaps)) <= 1.3 * gap_us, "in practice it stays near B"
    served = service_us(world)
    assert sum(served.values()) == world.busy_us
    assert abs(served["Aurora"] - served["Nova"]) <= 0.05 * world.busy_us


def test_weights_are_kept() -> None:
    cells = [
        TenantClassPolicy(tenant_id=t, priority_class=BATCH, weight=w)
        for t, w in (("Aurora", 4), ("Bulk", 2), ("Nova", 1))
    ]
    world = World(2_000, 8, 512, policy=policy(*cells), check=False)
    for tenant in ("Aurora", "Bulk", "Nova"):
        world.many(800, BATCH, 100, 20, tenant=tenant)
    while world.now_us < 20_000_000:
        world.run_step()
    served = service_us(world)
    shares = [served[tenant] / world.busy_us for tenant in ("Aurora", "Bulk", "Nova")]
    assert all(abs(share - weight / 7) <= 0.02 for share, weight in zip(shares, (4, 2, 1), strict=True)), shares


def test_a_quiet_tenant_is_served_after_at_most_one_head_of_a_flood_and_pays_nothing_for_having_slept() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    world.many(1_000, INTERACTIVE, 200, 10, tenant="Nova")
    world.run(50)
    quiet = world.submit(INTERACTIVE, 200, 10, tenant="Aurora")
    earlier = {i for i, story in world.stories.items() if story.first_planned_step is not None}
    world.run_until(lambda: world.story(quiet).first_planned_step is not None)
    passed = [
        i for i, s in world.stories.items() if s.first_planned_step is not None and i not in earlier and i != quiet
    ]
    assert len(passed) <= 1


def test_a_tenant_that_slept_banks_no_credit() -> None:
    world = World(1_000, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    world.many(400, INTERACTIVE, 100, 20, tenant="Nova")
    while world.now_us < 5_000_000:
        world.run_step()
    world.many(400, INTERACTIVE, 100, 20, tenant="Aurora")
    before = service_us(world)["Nova"]
    start_us = world.busy_us
    while world.busy_us < start_us + 3_000_000:
        world.run_step()
    assert service_us(world)["Nova"] - before >= 0.3 * 3_000_000


def test_the_copies_of_a_victim_are_paid_by_the_tenant_that_pushed_it_out() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100), bytes_per_block=500_000_000)
    world.many(2, BATCH, 500, 12)
    world.run(3)
    before = service_us(world)["Bulk"]
    chat = world.submit(INTERACTIVE, 64, 2, tenant="Aurora", reproducible=True)
    assert world.engine._state.config.num_host_blocks
    world.run_step()
    assert world.story(chat).first_planned_step == 3
    assert world.levers() == {"recompute": 1}, "at this link speed the prompt is cheaper to compute again"
    batch_share = service_us(world)["Bulk"] - before
    assert batch_share < world.duration_us(world.plans[-1]) // 3
    world.finish()
    stories = world.stories.values()
    spent = sum(s.finished.counters.gpu_us for s in stories if s.finished and s.request.tenant_id == "Bulk")
    assert service_us(world)["Bulk"] < spent, "what was computed again is on Aurora's account"
    assert sum(service_us(world).values()) == world.busy_us


@pytest.mark.parametrize(
    ("num_blocks", "num_slots", "prompt"),
    [(256, 2, 100), (230, 16, 1_300), (256, 16, 1_200)],
    ids=["slots", "memory", "mark"],
)
def test_a_tenant_far_behind_takes_room_from_one_far_ahead_in_its_own_class(
    num_blocks: int, num_slots: int, prompt: int
) -> None:
    world = World(num_blocks, num_slots, 512)
    ahead = world.many(2, BATCH, prompt, 400, tenant="Nova")  # 2.5 s of device time
    world.run(10)
    behind = world.submit(BATCH, prompt, 100, tenant="Aurora")
    world.run_until(lambda: world.story(behind).first_planned_step is not None)
    assert not any(world.story(i).has_ended for i in ahead)
    assert 1_000_000 <= service_us(world)["Nova"] <= 1_300_000
    (event,) = [preempted for i in ahead for _, preempted in world.story(i).preempted]
    assert event.resource is Resource.FAIRNESS
    world.finish()


def test_what_a_tenant_had_while_it_was_alone_is_not_held_against_it_when_a_flood_comes_first() -> None:
    world = World(2_000, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    for _ in range(20):
        world.submit(INTERACTIVE, 400, 60, tenant="Aurora")
        world.finish()
    for _ in range(40):
        world.submit(INTERACTIVE, 50, 200, tenant="Nova")
    world.run_step()
    quiet = world.submit(INTERACTIVE, 50, 5, tenant="Aurora")
    arrived_us = world.now_us
    world.run_until(lambda: world.story(quiet).has_ended)
    assert world.now_us - arrived_us < 3_000_000
    world.finish()


def test_the_step_of_a_quiet_tenants_first_token_carries_no_prompt_of_one_that_runs_more() -> None:
    world = World(4_000, 64, None, policy=policy(), check=False)
    world.many(12, INTERACTIVE, 200, 200, tenant="Nova")
    world.run(8)
    world.many(6, INTERACTIVE, 1_000, 20, tenant="Nova")
    world.run(1)  # its prompts are under way
    quiet = world.submit(INTERACTIVE, 300, 4, tenant="Aurora")
    world.run_step()
    assert [chunk.request_id for chunk in world.plans[-1].chunks] == [quiet]
    world.run_step()
    assert world.plans[-1].chunks, "and the next step is theirs again"


def test_tenants_who_share_a_class_make_shorter_steps_of_their_prompts_than_one_alone() -> None:
    def longest_us(other: str) -> int:
        world = World(8_000, 128, None, policy=policy(), check=False)
        world.submit(INTERACTIVE, 64, 2, tenant=other)
        world.finish()
        began = world.step
        world.many(60, INTERACTIVE, 800, 40, tenant="Nova")
        world.run(30)
        return max(world.duration_us(plan) for plan in world.plans[began + 5 :])

    alone_us, shared_us = longest_us("Nova"), longest_us("Aurora")
    assert 48_000 <= alone_us <= 50_000
    assert 36_000 <= shared_us <= 44_000


def test_a_prompt_that_was_given_a_part_of_the_step_is_not_pushed_out_in_it() -> None:
    world = World(30, 4, 16, policy=policy(fairness_gap_ms=1, quantum_steps=1, chunk_min=8, cap_memory_percent=100))
    world.submit(INTERACTIVE, 200, 10, tenant="Nova", hard_deadline_us=60_000_000)
    world.run(3)
    world.submit(INTERACTIVE, 300, 10, tenant="Aurora")
    world.submit(INTERACTIVE, 20, 1, tenant="Aurora")
    for _ in range(200):
        if not world.engine.has_work:
            break
        world.run_step()
        rows = {row.request_id for row in world.plans[-1].rows}
        assert not rows & {each.request_id for each in world.events[-1].preempted}


def test_each_turn_that_fairness_gives_gets_further_than_the_last_however_small_the_gap() -> None:
    edits = {"fairness_gap_ms": 1, "quantum_steps": 1, "chunk_min": 8, "cap_memory_percent": 100}
    world = World(20, 2, 16, num_host_blocks=0, policy=policy(max_queue_wait_ms=None, **edits))
    names = [world.submit(INTERACTIVE, 250, 4, tenant=tenant) for tenant in ("Nova", "Aurora")]  # one fits at a time
    world.finish(limit=1_000)
    assert world.levers()["recompute"] > 4
    assert all(len(world.story(name).token_ids) == 4 for name in names)


def test_no_tenants_device_time_falls_from_one_reading_to_the_next() -> None:
    world = World(2_000, 16, 512, policy=policy(max_queue_wait_ms=None), check=False)
    had: dict[str, tuple[int, ...]] = {}
    for step in range(600):
        for tenant in ("Aurora", "Bulk", "Nova"):
            if tenant != "Bulk" or step < 50:  # it rests, and its account lies between those that share every step
                backlog(world, tenant, 90, 20, at_least=3)
        world.run_step()
        for row in world.engine.tenants():
            assert all(now >= then for now, then in zip(row.gpu_us, had.get(row.tenant_id, row.gpu_us), strict=True))
            had[row.tenant_id] = row.gpu_us
    assert len(had) == 3
