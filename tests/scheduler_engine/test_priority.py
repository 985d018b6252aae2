"""Priority that bites: slots, memory and victims (cases S01, S02, S20, S23, S24, S45)."""

from __future__ import annotations

from scheduler_engine.events import FinishReason, Lever, Resource
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def test_s01_a_chat_displaces_a_batch_request_when_all_slots_are_taken() -> None:
    world = World(1_000, 4, 512)
    batch = world.many(4, BATCH, 64, 500)
    world.run(10)
    chat = world.submit(INTERACTIVE, 64, 10, tenant="Aurora")
    world.run_step()
    assert world.story(chat).first_planned_step == 10
    assert [p.lever for i in batch for _, p in world.story(i).preempted] == [Lever.HOLD]


def test_s01_later_chats_displace_only_batch_and_the_fifth_waits() -> None:
    world = World(1_000, 4, 512)
    batch = world.many(4, BATCH, 64, 500)
    world.run(10)
    chats = [world.submit(INTERACTIVE, 64, 40, tenant="Aurora")]
    world.run(2)
    chats += world.many(4, INTERACTIVE, 64, 40, tenant="Aurora")
    world.run(3)
    started = [chat for chat in chats if world.story(chat).first_planned_step is not None]
    assert started == chats[:4]
    assert all(len(world.story(i).preempted) == 1 for i in batch)
    world.finish()
    assert not any(world.story(chat).preempted for chat in chats)


def test_s02_a_shortage_of_memory_runs_the_same_planner_as_a_shortage_of_slots() -> None:
    world = World(64, 32, 512, policy=policy(cap_memory_percent=100))
    world.many(2, BATCH, 500, 12)  # 32 blocks each: the pool is full
    world.run(3)
    assert world.engine.load(0).num_free_blocks == 0
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    assert world.story(chat).first_planned_step == 3
    assert world.levers() == {"swap": 1}
    assert world.events[-1].preempted[0].resource is Resource.MEMORY


def test_s20_exactly_enough_victims_give_way() -> None:
    world = World(66, 8, 2_048, policy=policy(cap_memory_percent=100))
    batch = world.many(4, BATCH, 250, 6)  # 16 blocks each
    world.run(2)
    chat = world.submit(INTERACTIVE, 160, 4, tenant="Aurora")  # 10 blocks, 2 are free
    world.run_step()
    assert world.story(chat).first_planned_step == 2
    assert sum(len(world.story(i).preempted) for i in batch) == 1


def test_several_small_victims_give_way_together_or_not_at_all() -> None:
    world = World(64, 16, 2_048, policy=policy(cap_memory_percent=100))
    batch = world.many(8, BATCH, 120, 8)  # 8 blocks each
    world.run(2)
    chat = world.submit(INTERACTIVE, 380, 4, tenant="Aurora")  # 24 blocks
    world.run_step()
    assert world.story(chat).first_planned_step == 2
    assert sum(len(world.story(i).preempted) for i in batch) == 3


def test_a_chat_that_no_victim_can_make_room_for_displaces_nobody() -> None:
    world = World(68, 16, 2_048, policy=policy(cap_memory_percent=100))
    running = world.many(3, INTERACTIVE, 250, 60, tenant="Nova")  # 16 blocks each and growing, same class
    batch = world.submit(BATCH, 60, 4)
    world.run(2)
    big = world.submit(INTERACTIVE, 400, 4, tenant="Aurora")
    world.run_step()
    assert world.story(big).first_planned_step is None
    assert not any(world.story(i).preempted for i in [*running, batch])


def test_s23_growth_takes_the_cheap_victim_and_leaves_the_nearly_done_and_the_huge_alone() -> None:
    world = World(104, 8, 4_096, policy=policy(cap_memory_percent=100))
    world.teach(BATCH, output=12)  # so that nobody is expected to grow much
    nearly = world.submit(BATCH, 50, 14)  # 4 blocks to its end
    huge = world.submit(BATCH, 1_480, 150)  # 93 blocks
    small = world.submit(BATCH, 61, 400)  # 4 blocks, needs a fifth after 4 tokens
    world.run(1)
    filler = world.submit(DEFAULT, 40, 8, tenant="Aurora")  # the last three blocks
    world.run_until(lambda: any(world.story(i).preempted for i in (nearly, huge, small)))
    assert world.story(small).preempted
    assert not world.story(nearly).preempted
    assert not world.story(huge).preempted
    world.finish()
    assert world.story(filler).finished is not None


def test_s24_growth_is_settled_before_the_plan_is_written() -> None:
    world = World(12, 8, 512, policy=policy(cap_memory_percent=100))
    lowest = world.submit(BATCH, 60, 20)  # 4 blocks, needs a fifth after 4 tokens
    world.run(1)
    others = world.many(2, INTERACTIVE, 60, 10, tenant="Aurora")  # the same, and first in the order
    world.run(2)
    assert world.engine.load(0).num_free_blocks == 0
    world.run_until(lambda: bool(world.story(lowest).preempted))
    assert lowest not in {row.request_id for row in world.plans[-1].rows}
    world.finish()
    assert all(not world.story(other).preempted for other in others)
    assert len(world.story(lowest).token_ids) == 20


def test_s45_a_preempted_request_keeps_its_place() -> None:
    world = World(64, 2, 512, policy=policy(cap_memory_percent=100))
    first, second = world.many(2, BATCH, 400, 60)
    world.run(4)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    (victim,) = [i for i in (first, second) if world.story(i).preempted]
    late = world.many(48, BATCH, 40, 4)
    world.run_until(lambda: world.story(chat).has_ended)
    world.run_until(lambda: bool(world.story(victim).resumed_steps))
    assert all(world.story(i).first_planned_step is None for i in late)


def test_a_preempted_request_ends_with_the_tokens_it_would_have_had_alone() -> None:
    world = World(40, 4, 512, policy=policy(cap_memory_percent=100))
    batch = world.many(2, BATCH, 280, 30)
    for _ in range(5):
        world.run(5)
        world.submit(INTERACTIVE, 100, 3, tenant="Aurora")
    world.finish()
    assert any(world.story(request_id).preempted for request_id in batch)
    for request_id in batch:
        assert world.story(request_id).token_ids == [1_000 + index for index in range(30)]
        assert world.story(request_id).finished.reason is FinishReason.LENGTH


def test_a_chat_in_a_batch_flood_runs_in_the_next_step_whatever_the_flood() -> None:
    world = World(256, 8, 512)
    world.many(200, BATCH, 700, 60)
    waits = []
    for _ in range(20):
        world.run(7)
        asked = world.step
        chat = world.submit(INTERACTIVE, 90, 4, tenant="Aurora")
        world.run_step()
        waits.append(world.story(chat).first_planned_step == asked)
    assert all(waits)


def test_a_default_request_waits_out_its_patience_and_then_displaces_batch() -> None:
    world = World(64, 1, 512)
    batch = world.submit(BATCH, 64, 800)
    world.run(20)
    plain = world.submit(DEFAULT, 64, 4, tenant="Aurora")
    world.run(20)
    assert world.story(plain).first_planned_step is None or world.story(batch).preempted
    world.run_until(lambda: world.story(plain).has_ended)
    assert world.story(batch).preempted
    world.finish()


def test_a_request_that_was_pushed_out_for_slots_alone_keeps_its_memory_and_copies_nothing() -> None:
    world = World(1_000, 2, 512)
    batch = world.many(2, BATCH, 64, 60)
    world.run(5)
    world.submit(INTERACTIVE, 64, 5, tenant="Aurora")
    world.run_step()
    assert sorted(world.board().values()) == ["decode", "decode", "held"]
    world.finish()
    assert not any(plan.swap_out or plan.swap_in for plan in world.plans)
    assert all(len(world.story(i).token_ids) == 60 for i in batch)


def test_room_that_is_set_apart_for_one_who_may_push_out_nobody_does_not_stop_the_device() -> None:  # J5
    world = World(64, 8, bytes_per_block=20 * 2_097_152)
    world.many(6, BATCH, 64, 400)
    for _ in range(60):  # Aurora has more than its share of the device, and so no right to push out Bulk
        world.submit(INTERACTIVE, 512, 4, tenant="Aurora")
        world.run(8)
    world.finish()
