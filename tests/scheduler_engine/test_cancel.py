"""A client that leaves, in every state of a request, and everything it held comes back (case S140)."""

from __future__ import annotations

import pytest

from scheduler_engine.events import FinishReason
from tests.scheduler_engine.world import BATCH, INTERACTIVE, World, policy


def in_state(state: str) -> tuple[World, str]:
    """A world with one batch request brought into ``state``."""
    in_order = state != "saving"
    world = World(
        64,
        2 if state == "held" else 8,
        512,
        policy=policy(cap_memory_percent=100),
        num_host_blocks=0 if state == "dropped" else 256,
        copies_in_order=in_order,
        copy_steps=5,
    )
    other = world.submit(BATCH, 500, 12)
    request = world.submit(BATCH, 440, 40)
    match state:
        case "waiting":
            return world, request
        case "prefill":
            world.run(1)
        case "decode":
            world.run(6)
        case "held":
            world.run(3)
            world.many(2, INTERACTIVE, 10, 30, tenant="Aurora")
            world.run(1)
        case _:
            world.cancel(other)
            world.run(3)
            world.submit(INTERACTIVE, 700, 12, tenant="Aurora")
            world.run(1)
    return world, request


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "held", "on_host", "saving", "dropped"])
def test_s140_a_cancelled_request_is_gone_with_the_next_plan_and_pays_only_what_ran(state: str) -> None:
    world, request = in_state(state)
    shown = {"saving": "on_host", "waiting": None}.get(state, state)
    assert world.board().get(request) == shown
    num_tokens = len(world.story(request).token_ids)
    world.cancel(request)
    plan_step = world.step
    world.run_step()
    assert request not in {row.request_id for row in world.plans[plan_step].rows}
    finished = world.story(request).finished
    assert finished is not None
    assert (finished.reason, finished.detail) == (FinishReason.CANCELLED, "client")
    assert finished.output_tokens == num_tokens
    assert finished.prompt_tokens == {"waiting": 0, "prefill": 12}.get(state, 440)
    assert (finished.counters.gpu_us == 0) == (state == "waiting")
    world.finish()


def test_a_cancel_that_comes_with_its_submit_ends_it_before_it_ever_runs() -> None:
    world = World()
    request = world.submit(INTERACTIVE, 100, 10)
    world.cancel(request)
    world.run_step()
    assert world.plans[0].is_empty
    assert world.story(request).finished is not None
    assert world.story(request).finished.prompt_tokens == 0


def test_a_cancel_of_a_request_in_the_step_under_way_takes_effect_in_the_next_plan() -> None:
    world = World()
    request = world.submit(INTERACTIVE, 100, 10)
    world.run(2)
    plan = world.engine.plan_step(world.now_us)
    world.cancel(request)
    assert [row.request_id for row in plan.rows] == [request]
    world.engine.check_books()


def test_unknown_and_ended_requests_are_left_in_peace() -> None:
    world = World()
    request = world.submit(INTERACTIVE, 10, 2)
    world.cancel("nobody")
    world.finish()
    world.cancel(request)
    world.run_step()
    assert world.story(request).finished.reason is FinishReason.LENGTH


def test_a_cancelled_preemptor_leaves_its_victim_to_come_back() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100), copies_in_order=False, copy_steps=4)
    batch = world.many(2, BATCH, 500, 12)
    world.run(3)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_step()
    assert world.story(chat).first_planned_step is None, "the copy is under way"
    world.cancel(chat)
    world.finish()
    assert all(len(world.story(i).token_ids) == 12 for i in batch)
