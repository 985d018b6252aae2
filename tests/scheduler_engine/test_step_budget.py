"""How long a step may be: promises between tokens and to the first one, and what lower classes give up for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

from scheduler_engine.cost import CostConstants
from scheduler_engine.events import Lever, Resource
from scheduler_engine.policy import PolicySnapshot, cpu_classes
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy

CPU = CostConstants(
    base_ns=40_000_000,
    prefill_token_ns=2_700_000,
    prefill_context_ns=0,
    decode_row_ns=8_000_000,
    kv_token_ns=2_000,
    copy_operation_us=20,
    copy_bytes_per_us=4_000,
)


def gaps_us(world: World, request_id: str) -> list[int]:
    times = world.story(request_id).token_us
    return [later - earlier for earlier, later in pairwise(times)]


def test_batch_alone_computes_its_whole_token_budget() -> None:
    world = World(2_000, 64, None, policy=policy())
    world.many(8, BATCH, 1_000, 4)
    world.run_step()
    assert sum(len(row.token_ids) for row in world.plans[0].rows) == 2_048


def test_a_running_chat_keeps_its_gap_between_tokens_while_batch_prompts_pour_in() -> None:
    world = World(4_000, 64, None, policy=policy())
    chat = world.submit(INTERACTIVE, 64, 200, tenant="Aurora")
    world.run(2)
    world.many(30, BATCH, 2_000, 50)
    world.run_until(lambda: world.story(chat).has_ended)
    assert max(gaps_us(world, chat)) <= 50_000
    assert any(world.story(i).first_planned_step for i in world.stories if i.startswith("B"))


def test_decodes_of_batch_sit_out_a_step_that_would_break_the_promise_of_a_chat() -> None:
    world = World(9_000, 64, None, policy=policy(cap_memory_percent=100), check=False)
    batch = world.many(30, BATCH, 4_000, 300)  # 120,000 tokens attended: 7.8 ms, and 30 rows
    world.run_until(lambda: all(world.story(i).token_ids for i in batch))
    slow = CostConstants(**{**{f: getattr(world.cost, f) for f in world.cost.__slots__}, "decode_row_ns": 2_000_000})
    world.cost = slow  # the device turns slow: 30 rows now take 68 ms
    world.run(40)
    chat = world.submit(INTERACTIVE, 64, 60, tenant="Aurora")
    world.run_until(lambda: world.story(chat).has_ended)
    held = [p for event in world.events for p in event.preempted if p.resource is Resource.STEP_TIME]
    assert held
    assert {p.lever for p in held} == {Lever.HOLD}
    assert median(gaps_us(world, chat)) <= 50_000
    world.finish()
    assert all(len(world.story(i).token_ids) == 300 for i in batch)


def test_a_first_token_step_carries_little_of_the_lower_classes() -> None:
    world = World(
        728, 64, None, cost=CPU, policy=PolicySnapshot(version=1, classes=cpu_classes()), bytes_per_block=737_280
    )
    batch = world.many(30, BATCH, 64, 64)
    world.run_until(lambda: all(world.story(i).token_ids for i in batch))
    chat = world.submit(INTERACTIVE, 96, 4, tenant="Aurora")
    world.run_step()
    alone_us = 40_000 + 96 * 2_700 + 192
    assert world.story(chat).ttft_us <= alone_us * 11 // 10
    world.run_step()
    assert len(world.plans[-1].rows) >= 20, "they go on in the next step"


def test_holding_for_first_tokens_is_bounded_to_a_share_of_the_time() -> None:
    world = World(8_000, 64, None, policy=policy(governor_off_percent=1), check=False)
    batch = world.many(40, BATCH, 200, 1_900)
    world.run_until(lambda: all(world.story(i).token_ids for i in batch))
    before_us = world.now_us
    steps = world.step
    while world.now_us < before_us + 12_000_000:
        world.submit(INTERACTIVE, 64, 1, tenant="Aurora")
        world.run_step()
    num_short = sum(len(plan.rows) < len(batch) for plan in world.plans[steps:])
    assert 0 < num_short * 6_000 <= 0.03 * 12_000_000


def test_while_a_chat_was_active_in_the_last_minute_steps_stay_short_and_then_grow_again() -> None:
    world = World(4_000, 64, None, policy=policy())
    world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.run(6)
    world.many(100, BATCH, 3_000, 4)
    world.run(20)
    assert max(world.duration_us(plan) for plan in world.plans[7:]) <= 70_000  # batch loses 4 % by it
    world.now_us += 61_000_000
    world.run(2)
    assert world.duration_us(world.plans[-1]) > 80_000


def test_a_default_prefill_gets_its_smallest_chunk_even_where_chats_take_the_whole_step() -> None:
    world = World(4_000, 80, None, policy=policy())
    chats = world.many(60, INTERACTIVE, 64, 300, tenant="Aurora")
    world.run_until(lambda: all(world.story(i).token_ids for i in chats))
    plain = world.submit(DEFAULT, 640, 4, tenant="Aurora")
    world.run_until(lambda: bool(world.story(plain).token_ids), limit=12)


def test_steps_on_a_device_that_turned_slow_shrink_to_what_the_promises_bear() -> None:
    world = World(4_000, 64, None, policy=policy())
    chat = world.submit(INTERACTIVE, 64, 400, tenant="Aurora")
    world.run(2)
    world.many(40, BATCH, 3_000, 50)
    world.run(20)
    world.cost = CostConstants(**{f: 2 * getattr(world.cost, f) for f in world.cost.__slots__})
    world.run(40)
    assert max(gaps_us(world, chat)[-10:]) <= 55_000


def quick_cpu() -> CostConstants:
    """The small model on two quiet cores: a chat's own prompt takes a third of what the policy lets a step take."""
    return replace(CPU, base_ns=45_000_000, prefill_token_ns=1_200_000, decode_row_ns=3_500_000)


def on_cpu(cost: CostConstants, **fields: object) -> World:
    snapshot = PolicySnapshot(version=1, classes=cpu_classes())
    return World(728, 32, None, cost=cost, policy=snapshot, bytes_per_block=737_280, check=False, **fields)


def test_while_chats_come_steps_are_as_short_as_batch_can_well_bear() -> None:
    alone = on_cpu(quick_cpu())
    alone.many(64, BATCH, 256, 64)
    alone.finish()
    world = on_cpu(quick_cpu())
    world.submit(INTERACTIVE, 96, 4, tenant="Aurora")
    world.finish()
    began_us, began = world.now_us, world.step
    world.many(64, BATCH, 256, 64)
    world.finish()
    assert max(world.duration_us(plan) for plan in world.plans[began:]) <= 235_000
    assert world.duration_us(world.plans[began]) < 0.6 * alone.duration_us(alone.plans[0])
    assert alone.now_us >= 0.86 * (world.now_us - began_us)


def test_on_a_device_much_slower_than_its_policy_short_steps_cost_batch_a_quarter_at_most() -> None:
    slow = CostConstants(**{name: 4 * getattr(quick_cpu(), name) for name in quick_cpu().__slots__})
    alone = on_cpu(slow)
    alone.many(64, BATCH, 256, 64)
    alone.finish()
    world = on_cpu(slow)
    world.submit(INTERACTIVE, 96, 4, tenant="Aurora")
    world.finish()
    began_us, began = world.now_us, world.step
    world.many(64, BATCH, 256, 64)
    world.finish()
    assert world.duration_us(world.plans[began]) > 2 * 240_000, "the policy's cap would leave batch next to nothing"
    assert alone.now_us >= 0.75 * (world.now_us - began_us)


def test_a_calibration_that_was_disturbed_is_seen_through_within_some_steps() -> None:
    world = on_cpu(replace(quick_cpu(), prefill_token_ns=1, decode_row_ns=100_000))
    world.cost = quick_cpu()  # what the device really is
    world.submit(INTERACTIVE, 96, 12, tenant="Aurora")
    world.finish()
    began = world.step
    world.many(64, BATCH, 256, 64)
    world.run(60)
    lengths = [world.duration_us(plan) for plan in world.plans[began:]]
    assert max(lengths[10:]) <= 320_000
    assert median(lengths[30:]) <= 300_000
