"""Priority that bites and victims that count: what hurt users of other schedulers (cases, sections A and B)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler_engine.cost import CostConstants
from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, TOY, World, policy


def gaps_us(world: World, request_id: str) -> list[int]:
    return [later - earlier for earlier, later in pairwise(world.story(request_id).token_us)]


def test_s04_a_chat_among_thirty_batch_requests_is_hardly_slower_than_alone() -> None:
    alone = World()
    chat = alone.submit(INTERACTIVE, 200, 50, tenant="Aurora")
    alone.finish()
    alone_us = alone.story(chat).ttft_us
    world = World()
    world.many(30, BATCH, 1_000, 300)
    world.run(20)
    chat = world.submit(INTERACTIVE, 200, 50, tenant="Aurora")
    world.run_until(lambda: world.story(chat).has_ended)
    assert world.story(chat).ttft_us <= 2.5 * alone_us
    assert max(gaps_us(world, chat)) <= 50_000


def longest_gap_us(priority_class: PriorityClass) -> int:
    slow_rows = CostConstants(**{name: getattr(TOY, name) for name in TOY.__slots__} | {"decode_row_ns": 2_000_000})
    world = World(1_000, 32, 512, cost=slow_rows)
    world.many(30, DEFAULT, 64, 200)
    world.run(5)
    watched = world.submit(priority_class, 64, 60, tenant="Aurora")
    world.run_until(lambda: world.story(watched).has_ended)
    return sorted(gaps_us(world, watched))[-3]


def test_s05_priority_orders_service_and_not_only_entry() -> None:
    assert longest_gap_us(INTERACTIVE) <= 50_000 < longest_gap_us(DEFAULT), "31 rows of 2 ms are more than 50"


def test_s07_class_order_holds_on_a_healthy_device_whenever_anything_waits() -> None:
    world = World()
    world.many(50, DEFAULT, 200, 50)
    world.run(1)
    chat = world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.run_step()
    assert world.story(chat).first_planned_step == 1


def test_s09_when_memory_runs_out_the_batch_request_gives_way_and_not_the_short_chat() -> None:
    world = World(48, 8, 512, policy=policy(cap_memory_percent=100))
    world.teach(INTERACTIVE, output=20)
    world.teach(BATCH, output=20)
    chat, batch = world.submit(INTERACTIVE, 100, 300, tenant="Aurora"), world.submit(BATCH, 100, 500)
    world.run_until(lambda: world.story(chat).has_ended)
    assert world.story(batch).preempted
    assert not world.story(chat).preempted
    world.finish()


def test_s11_urgency_has_one_direction_and_one_set_of_names() -> None:
    assert [PriorityClass.from_label(c.label) for c in PriorityClass] == list(PriorityClass)
    assert min(PriorityClass) is INTERACTIVE
    with pytest.raises(ValueError, match="interactive, default or batch"):
        PriorityClass.from_label("urgent")


def test_s13_siblings_of_one_microsecond_are_told_apart_by_their_number() -> None:
    world = World(256, 1, 512)
    names = [world.submit(DEFAULT, 64, 3) for _ in range(4)]
    world.finish()
    starts = [world.story(i).first_planned_step for i in names]
    assert starts == sorted(set(starts))


def test_s16_streaming_batch_is_paused_without_loss() -> None:
    world = World(1_000, 4, 512)
    batch = world.many(4, BATCH, 64, 100)
    world.run_until(lambda: all(world.story(i).token_ids for i in batch))
    chat = world.submit(INTERACTIVE, 64, 10, tenant="Aurora")
    asked = world.step
    world.run_step()
    assert world.story(chat).first_planned_step == asked
    world.finish()
    assert all(world.story(i).token_ids == [1_000 + k for k in range(100)] for i in batch)


# victims


def test_s21_a_victim_counts_for_all_it_holds_prompt_and_all() -> None:
    world = World(128, 8, 2_048, policy=policy(cap_memory_percent=100))
    batch = [world.submit(BATCH, 900, 20), world.submit(BATCH, 900, 20)]  # 58 blocks each
    world.run(3)
    chat = world.submit(INTERACTIVE, 640, 4, tenant="Aurora")  # 41 blocks
    world.run_step()
    assert world.story(chat).first_planned_step == 3
    assert sum(len(world.story(i).preempted) for i in batch) == 1


def test_s26_one_that_cannot_grow_keeps_nobody_else_from_its_step() -> None:
    world = World(17, 8, 512, policy=policy(cap_memory_percent=100), num_host_blocks=0)
    world.teach(BATCH, output=4)
    stuck = world.submit(BATCH, 60, 40, reproducible=True)
    world.run(1)
    chats = world.many(2, INTERACTIVE, 90, 6, tenant="Aurora")  # six blocks each: the pool is full
    world.run_until(lambda: all(world.story(chat).has_ended for chat in chats), limit=30)
    assert all(max(gaps_us(world, chat)) <= 20_000 for chat in chats)
    world.finish()
    assert len(world.story(stuck).token_ids) == 40


def test_s27_blocks_under_way_are_waited_for_and_nobody_else_falls() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100), copies_in_order=False, copy_steps=6)
    batch = world.many(4, BATCH, 240, 12)  # 16 blocks each
    world.run(3)
    chat = world.submit(INTERACTIVE, 120, 4, tenant="Aurora")
    world.run(6)
    assert sum(len(world.story(i).preempted) for i in batch) == 1
    world.run_until(lambda: world.story(chat).has_ended)
    world.finish()


def test_s31_a_tight_pool_under_steady_load_completes_all_with_hardly_a_preemption() -> None:
    world = World(200, 16, 512, policy=policy(max_queue_wait_ms=None), check=False)
    asked: list[str] = []
    for number in range(150):
        asked.append(world.submit(DEFAULT, 512, 40, tenant="Aurora"))
        while world.now_us < (number + 1) * 33_333:
            world.run_step()
    world.finish()
    assert all(len(world.story(i).token_ids) == 40 for i in asked)
    assert sum(bool(world.story(i).preempted) for i in asked) <= 0.05 * len(asked)


def test_s32_one_that_can_never_fit_pushes_nobody_out() -> None:
    world = World(256, 16, 512)
    batch = world.many(10, BATCH, 200, 30)
    world.run(10)
    impossible = world.submit(INTERACTIVE, 16 * 299, 10, tenant="Aurora")
    world.run(5)
    assert world.story(impossible).rejected.reason is RejectReason.NEVER_FITS
    assert not any(world.story(i).preempted for i in batch)


def test_s33_a_burst_takes_one_victim_that_is_large_enough_for_all() -> None:
    world = World(48, 8, 2_048, policy=policy(cap_memory_percent=100))
    big = world.submit(BATCH, 700, 12)  # 45 blocks
    world.run(3)
    chats = world.many(3, INTERACTIVE, 200, 4, tenant="Aurora")  # 13 blocks each
    world.run_step()
    assert all(world.story(chat).first_planned_step == 3 for chat in chats)
    assert len(world.story(big).preempted) == 1
    assert sum(world.levers().values()) == 1, "what comes free for the first is counted for the others"
    world.finish()
