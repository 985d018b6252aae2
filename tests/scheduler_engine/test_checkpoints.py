"""Blocks saved ahead of need: a preemption copies the rest, and nobody waits for a copy that was made in advance."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_engine.events import Lever
from scheduler_engine.plan import RowFailure
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.scheduler_engine.contents import SharingWorld
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def pressed(**fields: Any) -> tuple[World, list[RequestId]]:
    """A full pool of batch while chats come now and then, long enough for copies to be made."""
    given: dict[str, Any] = {"policy": policy(cap_memory_percent=100), "num_blocks": 64, "num_slots": 8, **fields}
    world = SharingWorld(**given)
    world.submit(INTERACTIVE, 16, 2, tenant="Aurora")
    world.finish()
    batch = [RequestId(name) for name in world.many(2, BATCH, 430, 60)]
    world.run(40)
    return world, batch


def saved(world: World) -> int:
    return world.engine.load(world.now_us).num_checkpoint_blocks


def test_the_likeliest_victim_is_saved_and_gives_way_with_a_copy_of_the_rest_only() -> None:
    world, batch = pressed()
    assert saved(world) > 20
    before = len(world.plans)
    chat = world.submit(INTERACTIVE, 128, 8, tenant="Aurora")
    world.run_step()
    assert world.story(chat).first_planned_step == before, "in the same step"
    copied = world.plans[-1].swap_out
    assert {copy.request_id for copy in copied} < set(batch)
    assert len(copied) <= 3
    assert world.levers() == {"swap": 1}
    world.finish()


def test_what_is_saved_costs_its_victim_half_of_a_swap() -> None:
    world, batch = pressed()
    state = world.engine._state
    live = next(state.lives[name] for name in batch if state.lives[name].host_blocks)
    costs = state.journal.lever_costs(live, Lever.SWAP)
    num_blocks = state.config.num_blocks_for(live.computed)
    assert costs.swap_us < 2 * state.cost.copy_ns(num_blocks) // 1_000 * 6 // 10


def test_a_checkpoint_is_dropped_at_once_when_a_swap_needs_its_place() -> None:
    world, _ = pressed(num_host_blocks=32)
    assert 0 < saved(world) <= 16
    for _ in range(3):
        world.submit(INTERACTIVE, 300, 4, tenant="Aurora")
    world.run_step()
    assert world.levers()["swap"] == 1
    assert world.levers()["recompute"] <= 1
    world.finish()


def test_at_most_half_of_the_host_pool_holds_what_is_on_the_device_too() -> None:
    world, _ = pressed(num_host_blocks=40)
    assert saved(world) == 20


@pytest.mark.parametrize(
    "fields",
    [
        {"num_blocks": 256},
        {"num_host_blocks": 0},
        {"copies_in_order": False},
        {"policy": policy(cap_memory_percent=100, patience_steps=None, patience_ms=None)},
    ],
    ids=["room enough", "no host pool", "copies beside the forward", "nobody preempts"],
)
def test_nothing_is_copied_where_it_would_be_of_no_use(fields: dict[str, Any]) -> None:
    world, _ = pressed(**fields)
    assert world.engine.load(world.now_us).num_blocks_saved_ahead == 0
    assert not any(plan.swap_out for plan in world.plans)


def test_copies_ahead_take_a_64th_of_the_time_at_most() -> None:
    world, _ = pressed()
    num_copied = sum(len(plan.swap_out) for plan in world.plans)
    assert num_copied == world.engine.load(world.now_us).num_blocks_saved_ahead > 0
    assert world.cost.copy_us(num_blocks=num_copied, bytes_per_block=2_097_152) <= world.busy_us // 64


def test_a_failed_row_gives_its_checkpoint_back_and_is_computed_again() -> None:
    world, batch = pressed()
    state = world.engine._state
    name = next(name for name in batch if state.lives[name].host_blocks)
    world.fail_next[name] = RowFailure(name, "kernel_error", poison=False)
    world.run_step()
    assert not state.lives[name].host_blocks
    world.finish()


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([INTERACTIVE, DEFAULT, BATCH, BATCH]), st.integers(1, 300), st.integers(1, 40)),
        min_size=6,
        max_size=16,
    ),
    num_host_blocks=st.integers(0, 80),
    gap=st.integers(1, 12),
    cancelled=st.integers(0, 15),
)
def test_whoever_comes_and_goes_reads_its_own_blocks_and_all_come_back(
    arrivals: list[tuple[PriorityClass, int, int]], num_host_blocks: int, gap: int, cancelled: int
) -> None:
    world = SharingWorld(40, 5, 256, num_host_blocks=num_host_blocks, policy=policy(cap_memory_percent=100))
    names = []
    for rank, prompt, output in arrivals:
        names.append(world.submit(rank, prompt, output))
        world.run(gap)
    world.cancel(names[cancelled % len(names)])
    world.finish()
