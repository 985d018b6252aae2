"""Prompts that begin alike share blocks, and nothing goes wrong by it: counted, evicted, preempted, copied."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.events import Lever
from scheduler_engine.plan import RowFailure
from scheduler_engine.prefix_cache import Giving, PrefixPool
from scheduler_engine.request import RequestId
from tests.scheduler_engine.contents import SharingWorld, prefix
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def computed(world: World, request_id: str) -> int:
    """Prompt tokens that were really computed for a request."""
    length = len(world.story(request_id).request.prompt_token_ids)
    rows = [row for plan in world.plans for row in plan.rows if row.request_id == request_id and row.start < length]
    return sum(len(row.token_ids) for row in rows)


def test_the_second_of_two_equal_prompts_computes_only_what_is_not_known_and_its_last_token() -> None:
    world = SharingWorld()
    first = world.submit(INTERACTIVE, 512, 4, prefix_keys=prefix("system", 32))
    world.finish()
    second = world.submit(INTERACTIVE, 512, 4, prefix_keys=prefix("system", 32))
    world.finish()
    longer = world.submit(INTERACTIVE, 540, 4, prefix_keys=(*prefix("system", 32), b"and more"))
    world.finish()
    assert [computed(world, i) for i in (first, second, longer)] == [512, 16, 28]
    ends = [world.story(i).finished for i in (first, second, longer)]
    assert [end.cached_tokens for end in ends if end] == [0, 496, 512]
    assert [end.prompt_tokens for end in ends if end] == [512, 512, 540]
    assert world.story(second).ttft_us <= world.story(first).ttft_us // 3


def test_a_prompt_of_which_only_the_last_token_is_unknown_gives_its_first_token_in_the_next_step() -> None:
    world = SharingWorld()
    world.submit(INTERACTIVE, 33, 4, prefix_keys=prefix("system", 2))
    world.finish()
    again = world.submit(INTERACTIVE, 33, 4, prefix_keys=prefix("system", 2))
    world.run_step()
    assert len(world.story(again).token_ids) == 1
    world.finish()
    end = world.story(again).finished
    assert end is not None
    assert end.counters.ttft_us == world.story(again).ttft_us
    assert (end.cached_tokens, end.counters.num_steps) == (32, 4)


def test_nothing_is_shared_under_other_keys_or_none() -> None:
    world = SharingWorld()
    world.submit(INTERACTIVE, 64, 2, prefix_keys=prefix("of aurora", 4))
    world.finish()
    stranger = world.submit(INTERACTIVE, 64, 2, tenant="Stranger", prefix_keys=prefix("of stranger", 4))
    plain = world.submit(INTERACTIVE, 64, 2)
    world.finish()
    assert [computed(world, i) for i in (stranger, plain)] == [64, 64]


def test_s69_a_pool_full_of_cached_blocks_is_free_for_whoever_comes() -> None:
    world = SharingWorld(64, 8, 512)
    for name in "abcdefgh":
        world.submit(DEFAULT, 120, 4, prefix_keys=prefix(name, 7))
    world.finish()
    pool = world.engine._state.device
    assert pool.num_cached == 56
    assert pool.num_free == 64
    big = world.submit(DEFAULT, 900, 40)
    world.run_step()
    assert world.story(big).first_planned_step == world.step - 1
    world.finish()


def test_the_least_recently_used_prefix_goes_first_and_of_each_its_end() -> None:
    world = SharingWorld(32, 8, 512)
    for name in ("old", "new"):
        world.submit(DEFAULT, 130, 2, prefix_keys=prefix(name, 8))
        world.finish()
    world.submit(DEFAULT, 300, 2)  # takes 19 of 32 blocks: the 16 that are free, and 3 of the old prefix
    world.finish()
    old = world.submit(DEFAULT, 130, 2, prefix_keys=prefix("old", 8))
    new = world.submit(DEFAULT, 130, 2, prefix_keys=prefix("new", 8))
    world.finish()
    assert [computed(world, i) for i in (old, new)] == [130 - 5 * 16, 2]


@pytest.mark.parametrize("in_order", [True, False])
def test_s28_two_that_share_a_prefix_are_preempted_with_a_delayed_free_and_every_count_stays_right(
    in_order: bool,
) -> None:
    world = SharingWorld(64, 8, 512, policy=policy(cap_memory_percent=100), copies_in_order=in_order, copy_steps=3)
    world.submit(BATCH, 130, 2, prefix_keys=prefix("shared", 8))
    world.finish()
    sharers = [world.submit(BATCH, 360, 60, prefix_keys=prefix("shared", 8), reproducible=True) for _ in range(2)]
    world.run(3)
    chat = world.submit(INTERACTIVE, 900, 4, tenant="Aurora")
    world.run_until(lambda: world.story(chat).has_ended)
    assert all(world.story(i).preempted for i in sharers)
    assert world.levers()["swap"] >= 2
    world.finish()
    assert [len(world.story(i).token_ids) for i in sharers] == [60, 60]


def test_s30_a_prefix_that_was_swapped_out_and_in_is_never_confused_with_the_cached_one() -> None:
    world = SharingWorld(64, 4, 512, policy=policy(cap_memory_percent=100))
    world.submit(BATCH, 200, 4, prefix_keys=prefix("shared", 12))
    world.finish()
    batch = world.submit(BATCH, 400, 100, prefix_keys=prefix("shared", 12), reproducible=True)
    world.run(4)
    for number in range(12):  # each pushes it out and takes blocks that were cached
        world.submit(INTERACTIVE, 700, 3, tenant="Aurora", prefix_keys=prefix(f"chat {number}", 43))
        world.run(12)
        world.submit(BATCH, 200, 4, prefix_keys=prefix("shared", 12))
    assert world.levers()["swap"] > 0
    world.finish()
    assert len(world.story(batch).token_ids) == 100


def test_s21_a_victim_counts_for_the_blocks_that_nobody_else_holds() -> None:
    world = SharingWorld(128, 8, 512, policy=policy(cap_memory_percent=100))
    world.submit(BATCH, 300, 2, prefix_keys=prefix("shared", 18))
    world.finish()
    for _ in range(2):  # 19 blocks each, 18 of them the same
        world.submit(BATCH, 300, 60, prefix_keys=prefix("shared", 18))
    alone = world.submit(BATCH, 900, 20)
    world.run(6)
    chat = world.submit(INTERACTIVE, 960, 4, tenant="Aurora")
    world.run_until(lambda: world.story(chat).first_planned_step is not None, limit=5)
    gave_way = [i for i, story in world.stories.items() if any(p.lever is not Lever.HOLD for _, p in story.preempted)]
    assert gave_way == [alone]
    world.finish()


def test_s31_in_a_tight_pool_a_shared_prefix_changes_neither_who_ends_nor_how_often_somebody_gives_way() -> None:
    for keys in (prefix("system", 32), ()):
        world = SharingWorld(200, 16, 512, check=False, policy=policy(max_queue_wait_ms=None))
        num = 0
        while num < 120:
            if world.now_us >= num * 33_333:
                world.submit(DEFAULT, 540, 60, prefix_keys=keys)
                num += 1
            else:
                world.run_step()
        world.finish()
        assert all(story.finished for story in world.stories.values())
        assert sum(bool(story.preempted) for story in world.stories.values()) < 6


def test_what_a_failed_request_computed_is_found_by_nobody() -> None:
    world = SharingWorld(num_blocks=64)
    bad = world.submit(DEFAULT, 100, 20, prefix_keys=prefix("bad", 6))
    world.run(2)
    world.fail_next[bad] = RowFailure(RequestId(bad), "not_finite", False)
    world.run_step()
    world.finish()
    assert computed(world, bad) == 100 + 102, "its prompt, and all of it once more with two tokens of output"
    again = world.submit(DEFAULT, 100, 20, prefix_keys=prefix("bad", 6))
    world.finish()
    assert computed(world, again) == 4, "what the second try computed is sound"


def test_what_is_dropped_and_still_cached_is_not_computed_again() -> None:
    world = SharingWorld(64, 1, 512, num_host_blocks=0)
    batch = world.submit(BATCH, 500, 40, prefix_keys=prefix("long", 31))
    world.run(4)
    world.submit(INTERACTIVE, 300, 2, tenant="Aurora")
    world.finish()
    end = world.story(batch).finished
    assert end is not None
    assert end.counters.num_recomputes + end.counters.num_holds == 1
    assert end.counters.recomputed_tokens < 300
    assert len(world.story(batch).token_ids) == 40


# the pool itself


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "borrow", "publish", "give", "fence", "lift", "forget"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_whatever_is_done_each_block_has_one_place_and_as_many_owners_as_it_counts(
    moves: list[tuple[str, int]],
) -> None:
    pool = PrefixPool("device", 12)
    owners: dict[RequestId, list[int]] = {}
    fences: list[RequestId] = []
    for number, (move, which) in enumerate(moves):
        _move(pool, owners, fences, RequestId(f"r{number}"), move, which)
        pool.check_books(owners)
    giving = Giving(pool)
    promised = 0
    for blocks in owners.values():
        promised += giving.gain(blocks)
        giving.add(blocks)
    before = pool.num_free
    for blocks in owners.values():
        unique, free = pool.num_unique(blocks), pool.num_free
        pool.give(blocks)
        assert pool.num_free - free == unique
    assert pool.num_free - before == promised
    for request_id in fences:
        pool.lift_fence(request_id)
    pool.check_books({})
    assert pool.num_free == 12


def _move(
    pool: PrefixPool,
    owners: dict[RequestId, list[int]],
    fences: list[RequestId],
    request_id: RequestId,
    move: str,
    which: int,
) -> None:
    held = list(owners)[which % len(owners)] if owners else None
    if move == "take" and pool.num_free >= 1 + which % 4:
        owners[request_id] = pool.take(1 + which % 4)
    elif move == "borrow":
        owners[request_id] = pool.borrow(prefix("p", 1 + which % 4))
    elif move == "lift" and fences:
        pool.lift_fence(fences.pop())
    elif held and move == "publish":
        for block, key in zip(owners[held], prefix("p", len(owners[held])), strict=True):
            pool.publish(block, key)
    elif held and move == "give":
        pool.give(owners.pop(held))
    elif held and move == "fence":
        pool.fence(held, owners.pop(held))
        fences.append(held)
    elif held and move == "forget":
        pool.forget(owners[held])


def test_a_shared_block_given_too_often_or_lost_is_found() -> None:
    pool = PrefixPool("device", 4)
    mine = pool.take(2)
    for block, key in zip(mine, prefix("p", 2), strict=True):
        pool.publish(block, key)
    yours = pool.borrow(prefix("p", 2))
    assert yours == mine
    with pytest.raises(BrokenBooks, match="has 1 owners and counts 2"):
        pool.check_books({RequestId("mine"): mine})
    pool.give(yours)
    pool.check_books({RequestId("mine"): mine})
