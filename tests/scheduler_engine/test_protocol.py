"""The two verbs: in turn, with results that fit their plan, tokens that end where they should, and the same again."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_engine.config import EngineConfig
from scheduler_engine.errors import BrokenBooks, Misuse
from scheduler_engine.events import FinishReason, RejectReason
from scheduler_engine.plan import StepResult
from scheduler_engine.policy import TenantClassPolicy
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def test_a_second_plan_before_the_first_was_applied_is_misuse() -> None:
    world = World()
    world.engine.plan_step(0)
    with pytest.raises(Misuse, match="not applied"):
        world.engine.plan_step(0)


def test_a_result_without_a_plan_or_of_another_step_is_misuse() -> None:
    world = World()
    with pytest.raises(Misuse, match="no step"):
        world.engine.apply_step(StepResult(0, 0), 0)
    world.engine.plan_step(0)
    with pytest.raises(Misuse, match="result of step 7"):
        world.engine.apply_step(StepResult(7, 0), 0)


def test_a_row_that_neither_sampled_nor_failed_is_misuse_and_changes_nothing() -> None:
    world = World()
    world.submit(DEFAULT, 20, 5)
    world.engine.plan_step(0)
    for sampled, words in (([-1], "neither"), ([1, 2], "2 sampled tokens for 1")):
        with pytest.raises(Misuse, match=words):
            world.engine.apply_step(StepResult(0, 10, sampled), 10)
        world.engine.check_books()
    assert world.engine.apply_step(StepResult(0, 10, [3]), 10).tokens.token_ids == [3]


def test_an_empty_plan_is_a_step_too() -> None:
    world = World()
    assert world.run_step().step == 0
    assert world.plans[0].is_empty
    assert not world.engine.has_work


def test_events_of_a_plan_come_out_of_the_apply_that_follows_also_of_an_empty_one() -> None:
    world = World(64, 8, 512)
    world.submit(DEFAULT, 2_000, 10)
    assert world.engine.has_work
    events = world.run_step()
    assert world.plans[0].is_empty
    assert len(events.rejected) == 1
    assert not world.engine.has_work


def test_a_stop_token_ends_a_request_once_it_has_its_minimum() -> None:
    world = World()
    world.token = lambda request_id, index: 2 if index in (1, 4) else 9
    stops = world.submit(DEFAULT, 10, 50, stop_token_ids=(2,))
    waits = world.submit(DEFAULT, 10, 50, stop_token_ids=(2,), min_tokens=3)
    world.finish()
    assert [len(world.story(i).token_ids) for i in (stops, waits)] == [2, 5]
    assert world.story(stops).finished.reason is FinishReason.STOP


def test_a_stop_token_that_comes_with_the_last_one_allowed_ends_the_request_once() -> None:
    world = World()
    world.token = lambda request_id, index: 2 if index == 4 else 9
    request = world.submit(DEFAULT, 10, 5, stop_token_ids=(2,))
    world.finish()
    assert len(world.story(request).token_ids) == 5
    assert world.story(request).finished.reason is FinishReason.STOP


def test_a_stop_string_found_by_the_worker_ends_a_request_in_that_step() -> None:
    world = World()
    request = world.submit(DEFAULT, 10, 50)
    world.run(4)
    world.stop_next.add(request)
    world.run_step()
    assert world.story(request).finished.reason is FinishReason.STOP
    assert world.story(request).finished.output_tokens == 5


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 511, 512, 513])
def test_prompts_of_any_length_give_every_token_once_with_any_chunk(prompt: int) -> None:
    world = World(256, 8, 64)
    request = world.submit(DEFAULT, prompt, 33)
    world.finish()
    rows = [row for plan in world.plans for row in plan.rows]
    covered = [position for row in rows for position in range(row.start, row.start + len(row.token_ids))]
    assert covered == list(range(prompt + 32))
    assert world.story(request).token_ids == [1_000 + i for i in range(33)]


def test_delivered_tokens_of_an_earlier_attempt_are_history_and_the_stream_goes_on() -> None:
    world = World()
    request = world.submit(DEFAULT, 40, 10, delivered_token_ids=(1_000, 1_001, 1_002))
    world.finish()
    assert list(world.plans[0].rows[0].token_ids) == [*range(40), 1_000, 1_001, 1_002]
    assert world.story(request).token_ids == [1_000 + i for i in range(3, 10)]
    assert world.story(request).finished.output_tokens == 10


STARTED = [{"delivered_token_ids": (1_000,)}, {"response_has_started": True}]
started_elsewhere = pytest.mark.parametrize("started", STARTED, ids=["with a token", "by another choice"])


@started_elsewhere
def test_a_request_that_started_in_an_earlier_attempt_is_never_shed(started: dict[str, Any]) -> None:
    world = World(64, 1, 64)
    world.submit(DEFAULT, 400, 400)
    world.run(2)
    request = world.submit(
        DEFAULT, 40, 10, hard_deadline_us=1, max_queue_wait_us=1, completion_deadline_us=1, **started
    )
    world.finish()
    assert world.story(request).finished.reason is FinishReason.LENGTH


@started_elsewhere
def test_what_started_in_an_earlier_attempt_runs_to_its_end_also_at_a_worker_that_drains(
    started: dict[str, Any],
) -> None:
    world = World(64, 1, 64)
    world.submit(DEFAULT, 400, 40)
    world.run(2)
    waiting, fresh = world.submit(DEFAULT, 40, 10, **started), world.submit(DEFAULT, 40, 10)
    world.run_step()
    world.engine.drain()
    late = world.submit(DEFAULT, 40, 10, **started)
    world.finish()
    for request in (waiting, late):
        assert world.story(request).finished.reason is FinishReason.LENGTH
        assert world.story(request).finished.output_tokens == 10
    assert world.story(fresh).rejected.reason is RejectReason.DRAINING


@pytest.mark.parametrize("num_delivered", [23, 24, 25])
def test_what_an_earlier_attempt_brought_to_the_end_of_the_context_ends_by_length(num_delivered: int) -> None:
    """Its worker died before it could say so, or had a longer context."""
    world = World(max_model_len=64)
    request = world.submit(DEFAULT, 40, 100, delivered_token_ids=tuple(range(1_000, 1_000 + num_delivered)))
    world.finish()
    assert world.story(request).finished.reason is FinishReason.LENGTH
    assert world.story(request).finished.output_tokens == max(24, num_delivered)


@started_elsewhere
@pytest.mark.parametrize("closed", [{"allowed": False}, {"concurrency": 0}], ids=["paused", "no slot"])
def test_what_started_in_an_earlier_attempt_waits_while_its_class_is_paused_and_then_goes_on(
    closed: dict[str, Any], started: dict[str, Any]
) -> None:
    world = World(policy=policy(TenantClassPolicy(tenant_id="Nova", priority_class=DEFAULT, **closed)))
    request = world.submit(DEFAULT, 40, 10, tenant="Nova", **started)
    fresh = world.submit(DEFAULT, 40, 10, tenant="Nova")
    world.run(5)
    assert world.story(request).rejected is None
    assert world.story(request).token_ids == []
    assert world.story(fresh).rejected is not None
    world.engine.set_policy(policy(version=2))
    world.finish()
    num_delivered = len(started.get("delivered_token_ids", ()))
    assert world.story(request).token_ids == [1_000 + i for i in range(num_delivered, 10)]


def test_the_same_inputs_give_the_same_plans() -> None:
    def plans() -> list[object]:
        world = World(96, 6, 256)
        for i in range(60):
            if i % 3 == 0:
                world.submit(INTERACTIVE, 60 + i, 9, tenant="Aurora")
            world.submit(BATCH, 300 + i, 30, tenant="Bulk" if i % 2 else "Nova")
            world.run(2)
        world.finish()
        return [
            (p.step, [(r.request_id, r.start, len(r.token_ids)) for r in p.rows], p.swap_out, p.swap_in)
            for p in world.plans
        ]

    assert plans() == plans()


def test_counters_tell_what_a_request_went_through() -> None:
    world = World(64, 1, 512)
    batch = world.submit(BATCH, 64, 40)
    world.run(5)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.finish()
    counters = world.story(batch).finished.counters
    assert (counters.num_holds, counters.num_swaps, counters.num_recomputes) == (1, 0, 0)
    assert counters.num_steps == 40
    assert counters.queue_us == 0
    assert counters.ttft_us == world.story(batch).ttft_us
    chat_us = world.story(chat).finished.counters.gpu_us
    assert counters.gpu_us + chat_us == world.busy_us


def test_a_policy_edited_in_the_middle_takes_effect_with_the_next_plan_and_strands_nobody() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100))
    big = world.submit(BATCH, 700, 200)
    running = world.submit(BATCH, 40, 60)
    world.engine.set_policy(
        policy(version=2, cap_memory_percent=20, cap_slots_percent=1, token_budget_max=32, chunk_max=32)
    )
    world.run_step()
    assert world.plans[0].rows
    assert sum(len(row.token_ids) for row in world.plans[0].rows) <= 32
    world.finish()
    assert world.story(big).rejected is not None or len(world.story(big).token_ids) == 200
    assert len(world.story(running).token_ids) == 60


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(Misuse, match="num_blocks must be positive"):
        EngineConfig(num_blocks=0, num_host_blocks=0, num_slots=1, max_model_len=10)


def test_broken_books_are_found() -> None:
    world = World()
    world.submit(DEFAULT, 40, 30)
    world.run(3)
    world.engine._state.lives["D1"].block_table.append(200)
    with pytest.raises(BrokenBooks, match="block 200"):
        world.engine.check_books()
