"""Resume, head of line, prefill beside decode (cases, sections C, E and F)."""

from __future__ import annotations

from itertools import pairwise

from scheduler_engine.events import FinishReason, RejectReason
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy

TAU_US = 50_000


def gaps_us(world: World, request_id: str) -> list[int]:
    return [later - earlier for earlier, later in pairwise(world.story(request_id).token_us)]


def test_s44_when_all_need_a_block_in_the_same_step_the_oldest_goes_on() -> None:
    world = World(16, 8, 512, policy=policy(cap_memory_percent=100), num_host_blocks=0)
    world.teach(BATCH, output=2)
    asked = world.many(4, BATCH, 62, 60)  # four blocks each, all at their edge after the same step
    oldest = asked[0]
    world.run_until(lambda: world.story(oldest).has_ended, limit=120)
    world.finish()
    assert all(len(world.story(i).token_ids) == 60 for i in asked)


def test_s47_requests_that_are_being_copied_out_take_no_slots() -> None:
    world = World(64, 4, 2_048, policy=policy(cap_memory_percent=100), copies_in_order=False, copy_steps=30)
    world.many(4, BATCH, 240, 12)
    world.run(2)
    chat = world.submit(INTERACTIVE, 900, 4, tenant="Aurora")  # 57 blocks: all four go
    world.run(2)
    assert sum(state == "on_host" for state in world.board().values()) == 4
    assert world.engine.load(world.now_us).num_free_slots == 4
    world.run_until(lambda: world.story(chat).has_ended)
    world.finish()


def test_s49_the_last_running_request_may_vanish_and_the_step_is_empty() -> None:
    world = World()
    only = world.submit(BATCH, 64, 40)
    world.run(4)
    world.cancel(only)
    world.run_step()
    assert world.plans[-1].is_empty
    assert not world.engine.has_work


def test_s50_what_would_outgrow_the_pool_is_refused_at_the_door() -> None:
    world = World(32, 8, 512)
    too_long, fits = world.submit(BATCH, 100, 2_000), world.submit(BATCH, 100, 300)
    world.finish()
    assert world.story(too_long).rejected.reason is RejectReason.NEVER_FITS
    assert world.story(fits).finished.reason is FinishReason.LENGTH


def test_s57_a_host_that_is_almost_full_takes_the_victim_that_still_fits() -> None:
    world = World(66, 8, 2_048, policy=policy(cap_memory_percent=100), num_host_blocks=20)
    big, small = world.submit(BATCH, 700, 12), world.submit(BATCH, 250, 12)  # 44 and 16 blocks
    world.run(3)
    chat = world.submit(INTERACTIVE, 200, 4, tenant="Aurora")  # 13 blocks
    world.run_step()
    assert world.story(chat).first_planned_step == 3
    assert world.levers() == {"swap": 1}, "computing 700 tokens again is dearer than copying 16 blocks"
    assert world.story(small).preempted
    assert not world.story(big).preempted


# E: head of line


def test_s81_absent_limits_on_outputs_do_not_serialise_those_who_say_little() -> None:
    world = World(64, 8, 512)
    impossible = world.submit(DEFAULT, 2_000, 10)
    world.run_step()
    assert world.story(impossible).rejected.reason is RejectReason.NEVER_FITS
    for _ in range(6):  # the engine sees how long they really are
        short = world.submit(DEFAULT, 50, 20, tenant="Aurora")
        world.run_until(lambda short=short: world.story(short).has_ended)
    asked = world.many(8, DEFAULT, 50, 900, tenant="Aurora")
    world.run(6)
    assert sum(state in ("decode", "prefill") for state in world.board().values()) == 8
    for _ in range(14):
        world.run_step()
    world.stop_next.update(asked)
    world.run_step()
    world.finish()


def test_s85_long_prefills_do_not_keep_chats_from_their_own() -> None:
    world = World(6_000, 16, 512)
    long = world.many(4, DEFAULT, 20_000, 10)
    world.run(3)
    chats = [world.submit(INTERACTIVE, 300, 4, tenant="Aurora") for _ in range(3)]
    world.run_until(lambda: all(world.story(chat).token_ids for chat in chats))
    assert max(world.story(chat).ttft_us for chat in chats) <= 200_000
    started = {row.request_id for plan in world.plans for row in plan.rows}
    world.run(60)
    assert started & set(long), "and they share what is left"


# F: prefill beside decode


def test_s100_a_flood_of_prompts_leaves_a_running_chat_its_pace() -> None:
    world = World(6_000, 32, 512, check=False)
    chat = world.submit(INTERACTIVE, 100, 120, tenant="Aurora")
    world.run(2)
    while not world.story(chat).has_ended:
        if world.step < 12:
            world.submit(DEFAULT, 8_000, 200, tenant="Nova")
        world.run_step()
    assert max(gaps_us(world, chat)) <= TAU_US


def test_s101_a_prompt_of_64_thousand_tokens_leaves_a_running_chat_its_pace() -> None:
    world = World(6_000, 8, 512, check=False)
    chat = world.submit(INTERACTIVE, 100, 100, tenant="Aurora")
    world.run(2)
    world.submit(BATCH, 64_000, 1)
    world.run_until(lambda: world.story(chat).has_ended)
    assert max(gaps_us(world, chat)) <= TAU_US


def test_s102_many_small_prefills_ride_along_and_neither_side_pays() -> None:
    def chats_beside(num_decodes: int) -> tuple[int, int]:
        world = World(4_000, 128, 512, check=False)
        decodes = world.many(num_decodes, INTERACTIVE, 64, 400, tenant="Nova")
        world.run(20)
        chats = []
        for _ in range(30):
            chats.append(world.submit(INTERACTIVE, 40, 40, tenant="Aurora"))
            world.run(2)
        ttfts = sorted(world.story(chat).ttft_us for chat in chats)
        return ttfts[27], max((max(gaps_us(world, i)) for i in decodes), default=0)

    alone_us, _ = chats_beside(0)
    ttft_us, gap_us = chats_beside(32)
    assert gap_us <= TAU_US
    assert ttft_us <= 1.5 * alone_us, "1.2 where a step does not grow by the 32 rows themselves"


def test_who_keeps_memory_goes_on_when_nobody_else_runs_though_the_head_of_the_line_waits_for_it() -> None:
    world = World(29, 1, 512, policy=policy(fairness_gap_ms=10, quantum_steps=3), num_host_blocks=0)
    keeps = world.submit(BATCH, 230, 60, tenant="Bulk", reproducible=True)  # can be held, and in no other way give way
    world.run(1)
    waits = world.submit(BATCH, 300, 20, tenant="Nova")  # will have had less than Bulk, and wants what it keeps
    world.run(20)
    chat = world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.run_until(lambda: world.story(chat).has_ended, limit=20)
    assert world.board()[keeps] == "held"
    world.run_until(lambda: world.story(keeps).has_ended, limit=100)
    world.run_until(lambda: world.story(waits).has_ended, limit=100)


def test_of_those_who_all_wait_for_a_block_and_must_come_out_the_same_the_most_urgent_goes_on() -> None:
    world = World(12, 3, 512, policy=policy(cap_memory_percent=100, quantum_steps=1), num_host_blocks=0)
    for rank in (INTERACTIVE, DEFAULT, BATCH):
        world.teach(rank, output=2)
    asked = [
        world.submit(rank, 60, 40, reproducible=True) for rank in (INTERACTIVE, DEFAULT, BATCH)
    ]  # four blocks each
    world.finish(limit=400)
    assert all(len(world.story(i).token_ids) == 40 for i in asked)
    ends = [world.story(i).token_us[-1] for i in asked]
    assert ends == sorted(ends)
