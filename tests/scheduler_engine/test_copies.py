"""Blocks in flight: fences where copies run beside the forward, and the order of copies where they do not."""

from __future__ import annotations

import pytest

from scheduler_engine.errors import Misuse
from scheduler_engine.plan import StepResult
from tests.scheduler_engine.world import BATCH, INTERACTIVE, World, policy


def fill(**fields: object) -> tuple[World, list[str], str]:
    """A full pool of batch and a chat that wants in."""
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100), **fields)
    batch = world.many(2, BATCH, 500, 12)
    world.run(3)
    return world, batch, world.submit(INTERACTIVE, 64, 8, tenant="Aurora")


def test_copies_in_order_free_their_blocks_for_the_same_step() -> None:
    world, _, chat = fill()
    world.run_step()
    plan = world.plans[-1]
    freed = {copy.device_block for copy in plan.swap_out}
    taken = next(set(row.block_table) for row in plan.rows if row.request_id == chat)
    assert taken & freed


def test_copies_beside_the_forward_fence_their_blocks_until_they_are_done() -> None:
    world, batch, chat = fill(copies_in_order=False, copy_steps=3)
    world.run_step()
    fenced = {copy.device_block for copy in world.plans[-1].swap_out}
    for _ in range(3):
        assert world.story(chat).first_planned_step is None
        used = {block for row in world.plans[-1].rows for block in row.block_table}
        assert not used & fenced
        world.run_step()
    world.run_step()
    assert world.story(chat).first_planned_step is not None
    assert sum(len(world.story(i).preempted) for i in batch) == 1, "one victim, however long its copy takes"
    world.finish()


def test_nobody_is_copied_in_while_its_copy_out_is_under_way() -> None:
    world, _, chat = fill(copies_in_order=False, copy_steps=6)
    world.run_step()
    (victim,) = {copy.request_id for copy in world.plans[-1].swap_out}
    world.cancel(chat)
    for _ in range(5):
        world.run_step()
        assert all(copy.request_id != victim for copy in world.plans[-1].swap_in)
    world.finish()
    assert len(world.story(victim).token_ids) == 12


def test_a_host_block_is_not_written_in_the_step_that_still_reads_it() -> None:
    world = World(96, 8, 512, num_host_blocks=64)
    world.many(12, BATCH, 400, 40)
    for i in range(120):
        world.run(1)
        if i % 4 == 0:
            world.submit(INTERACTIVE, 100, 6, tenant="Aurora")
    world.finish()
    for plan in world.plans:
        assert not {copy.host_block for copy in plan.swap_in} & {copy.host_block for copy in plan.swap_out}
        read = [copy.device_block for copy in plan.swap_in]
        assert len(read) == len(set(read))


def test_what_comes_back_from_the_host_is_what_went_there() -> None:
    """Follow block contents through a pool of labels, as a device would."""
    world = World(96, 8, 512, num_host_blocks=200)
    batch = world.many(8, BATCH, 400, 40)
    device: dict[int, tuple[str, int]] = {}
    host: dict[int, tuple[str, int]] = {}
    for i in range(400):
        if i % 4 == 0 and i < 100:
            world.submit(INTERACTIVE, 100, 6, tenant="Aurora")
        world.run_step()
        plan = world.plans[-1]
        for copy in plan.swap_out:
            host[copy.host_block] = device[copy.device_block]
        for copy in plan.swap_in:
            device[copy.device_block] = host[copy.host_block]
        for row, start, length in ((row, row.start, len(row.token_ids)) for row in plan.rows):
            for index in range(start // 16):
                assert device[row.block_table[index]] == (row.request_id, index)
            for index in range(start // 16, -(-(start + length) // 16)):
                device[row.block_table[index]] = (row.request_id, index)
    assert world.levers()["swap"] > 0
    assert all(world.story(i).has_ended for i in batch)


def test_a_completed_copy_nobody_started_is_misuse_and_changes_nothing() -> None:
    world, _, _ = fill(copies_in_order=False)
    plan = world.engine.plan_step(world.now_us)
    sampled = [1 if row.samples else -1 for row in plan.rows]
    with pytest.raises(Misuse, match="copy of nobody"):
        world.engine.apply_step(StepResult(plan.step, 10, sampled, completed_copies=("nobody",)), world.now_us)
    world.engine.check_books()
    world.engine.apply_step(StepResult(plan.step, 10, sampled), world.now_us)
    world.engine.check_books()


def test_a_decode_that_has_to_go_itself_for_the_growth_of_its_class_gets_no_block_in_that_step() -> None:
    world = World(20, 8, 512, policy=policy(cap_memory_percent=100), copies_in_order=False, copy_steps=2)
    world.teach(BATCH, output=2)  # so that both are let in
    requests = world.many(2, BATCH, 158, 40)  # 10 blocks each, both at an edge after two tokens
    world.run(3)
    assert world.engine.load(0).num_free_blocks == 0
    world.run(1)
    (victim,) = {copy.request_id for copy in world.plans[-1].swap_out}
    assert world.plans[-1].rows == ()
    assert victim == requests[1]
    world.finish()
    assert [len(world.story(i).token_ids) for i in requests] == [40, 40]
