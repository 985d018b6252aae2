"""Hold, swap or recompute: the cheapest lever that is open, on a fast link, a slow one and a full host."""

from __future__ import annotations

import pytest

from scheduler_engine.events import FinishReason
from tests.scheduler_engine.world import BATCH, INTERACTIVE, RowFailure, World, policy


def pushed_out(world: World, **fields: object) -> dict[str, int]:
    """Two batch requests fill the pool; a chat comes. By which lever does one give way?"""
    batch = world.many(2, BATCH, 500, 12, **fields)
    world.run(3)
    world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    levers = dict(world.levers())
    world.finish()
    assert all(world.story(i).token_ids == [1_000 + k for k in range(12)] for i in batch)
    return levers


def full(**fields: object) -> World:
    return World(64, 8, 512, policy=policy(cap_memory_percent=100), **fields)


def test_a_fast_link_swaps() -> None:
    assert pushed_out(full()) == {"swap": 1}


def test_a_slow_link_recomputes() -> None:
    assert pushed_out(full(bytes_per_block=100_000_000)) == {"recompute": 1}


@pytest.mark.parametrize(("bytes_per_block", "lever"), [(17_000_000, "swap"), (18_000_000, "recompute")])
def test_the_choice_turns_where_the_costs_cross(bytes_per_block: int, lever: str) -> None:
    """S72: 501 tokens x 45 us = 22.5 ms against 2 x 32 blocks x (5 us + bytes / 50 GB/s): equal at 17.3 MB."""
    assert pushed_out(full(bytes_per_block=bytes_per_block)) == {lever: 1}


def test_without_room_on_the_host_it_recomputes() -> None:
    assert pushed_out(full(num_host_blocks=16)) == {"recompute": 1}


def test_a_request_that_must_come_out_bit_equal_is_never_recomputed_for_somebody_else() -> None:
    assert pushed_out(full(bytes_per_block=100_000_000), reproducible=True) == {"swap": 1}
    assert pushed_out(full(num_host_blocks=16), reproducible=True) == {}


def test_recomputed_tokens_are_counted_and_not_billed() -> None:
    world = full(num_host_blocks=0)
    batch = world.many(2, BATCH, 500, 12)
    world.run(3)
    world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.finish()
    (victim,) = [i for i in batch if world.story(i).preempted]
    finished = world.story(victim).finished
    assert finished is not None
    assert finished.prompt_tokens == 500
    assert finished.output_tokens == 12
    assert 500 <= finished.counters.recomputed_tokens <= 503
    assert finished.counters.num_recomputes == 1


def test_swapped_blocks_are_those_that_hold_something() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100))
    world.many(2, BATCH, 500, 12)
    world.run_step()  # 500 tokens of the first, 12 of the second
    world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    copies = world.plans[-1].swap_out
    assert len(copies) == 1, "the second had one block of its 32 in use"
    world.finish()


def test_a_row_that_fails_comes_back_by_recompute_with_the_same_tokens() -> None:
    world = World()
    request = world.submit(BATCH, 100, 20)
    world.run(6)
    world.fail_next[request] = RowFailure(request, "not_finite", poison=False)
    world.run_step()
    assert world.events[-1].preempted[0].by is None
    world.finish()
    assert world.story(request).token_ids == [1_000 + k for k in range(20)]


def test_a_poisoned_row_and_one_that_fails_again_and_again_end_and_the_others_live() -> None:
    world = World()
    poisoned, stubborn, healthy = world.many(3, BATCH, 100, 60)
    world.run(2)
    world.fail_next[poisoned] = RowFailure(poisoned, "kernel_error", poison=True)
    world.run_step()
    while not world.story(stubborn).has_ended:
        world.fail_next[stubborn] = RowFailure(stubborn, "out_of_memory", poison=False)
        world.run_step()
    world.finish()
    ends = {i: world.story(i).finished for i in (poisoned, stubborn, healthy)}
    assert [end.reason for end in ends.values() if end] == [
        FinishReason.FAILED,
        FinishReason.FAILED,
        FinishReason.LENGTH,
    ]
    assert ends[poisoned] is not None
    assert ends[poisoned].detail == "kernel_error"


@pytest.mark.parametrize(("bytes_per_block", "levers"), [(8_000_000, {}), (2_000_000, {"swap": 1})])
def test_it_waits_for_an_end_that_comes_sooner_than_copies_would_take(
    bytes_per_block: int, levers: dict[str, int]
) -> None:
    world = full(bytes_per_block=bytes_per_block)  # out and in again: 10.6 ms, or 2.9 ms; a step: 6.1 ms
    batch = world.many(2, BATCH, 500, 12)
    world.run_until(lambda: len(world.story(batch[0]).token_ids) >= 11)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    asked = world.step
    world.run_until(lambda: world.story(chat).first_planned_step is not None)
    assert world.step - asked <= 2
    assert world.levers() == levers
