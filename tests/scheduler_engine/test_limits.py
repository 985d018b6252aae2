"""What an operator's limits mean: floors, caps of slots, tenants that are barred; and that no edit strands anybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_engine.claims import beyond_floor
from scheduler_engine.errors import Misuse
from scheduler_engine.events import RejectReason
from scheduler_engine.governor import Governor
from scheduler_engine.plan import StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, gpu_classes
from scheduler_engine.request import RequestId
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, TOY, World, policy

SECOND_US = 1_000_000
SLOW_ROWS = replace(TOY, decode_row_ns=1_000_000)  # forty chats fill a step


def with_class(
    priority_class: PriorityClass, base: PolicySnapshot | None = None, **fields: int | None
) -> PolicySnapshot:
    found = base or policy()
    rows = tuple(replace(r, **fields) if i == priority_class else r for i, r in enumerate(found.classes))  # type: ignore[arg-type]
    return replace(found, classes=rows)  # type: ignore[arg-type]


class Streams:
    """A number of requests of a class under way, ended ones replaced."""

    def __init__(self, world: World, priority_class: PriorityClass, prompt: int, output: int, tenant: str) -> None:
        self._world, self._made_of, self._tenant = world, (priority_class, prompt, output), tenant
        self._alive: list[str] = []

    def keep(self, count: int) -> None:
        self._alive = [i for i in self._alive if not self._world.story(i).has_ended]
        self._alive += self._world.many(count - len(self._alive), *self._made_of, tenant=self._tenant)


def had_us(world: World, priority_class: PriorityClass) -> int:
    return sum(us for (rank, _), us in world.engine.charges_us().items() if rank is priority_class)


@pytest.mark.parametrize("floor_percent", [5, 20, 40])
def test_batch_gets_its_floor_of_a_device_that_chats_would_fill(floor_percent: int) -> None:
    rules = with_class(DEFAULT, with_class(BATCH, floor_percent=floor_percent), floor_percent=0)
    world = World(50_000, 100, None, policy=rules, cost=SLOW_ROWS, check=False, max_model_len=8_192)
    chats = Streams(world, INTERACTIVE, 32, 400, "Chats")
    batch = Streams(world, BATCH, 600, 300, "Bulk")
    while world.now_us < 60 * SECOND_US:
        chats.keep(42)
        batch.keep(50)
        world.run_step()
        if world.now_us < 30 * SECOND_US:  # a full window of credit is used up first
            before_us, busy_us = had_us(world, BATCH), world.busy_us
    share = 100 * (had_us(world, BATCH) - before_us) / (world.busy_us - busy_us)
    assert share >= 0.97 * floor_percent


def test_a_class_in_debt_gets_prompt_tokens_though_decodes_of_others_use_up_its_budget_of_tokens() -> None:
    budget = {"token_budget_max": 64, "chunk_max": 64, "chunk_min": 16, "floor_percent": 20}
    rules = with_class(DEFAULT, with_class(BATCH, **budget), floor_percent=0)
    world = World(8_000, 256, None, policy=rules, check=False, max_model_len=8_192)
    chats, batch = Streams(world, INTERACTIVE, 32, 300, "Chats"), Streams(world, BATCH, 600, 300, "Bulk")
    for count in range(70):
        chats.keep(count + 1)
        world.run(3)
    while world.now_us < 24 * SECOND_US:
        chats.keep(70)
        batch.keep(20)
        world.run_step()
    assert had_us(world, BATCH) >= SECOND_US


@pytest.mark.parametrize("floor_percent", [0, 5])
def test_a_chat_meets_no_memory_that_a_class_in_debt_cannot_spare(floor_percent: int) -> None:
    rules = with_class(DEFAULT, with_class(BATCH, floor_percent=floor_percent), floor_percent=0)
    world = World(300, 40, None, policy=rules, cost=SLOW_ROWS, check=False, max_model_len=8_192)
    chats, batch = Streams(world, INTERACTIVE, 16, 100, "Aurora"), Streams(world, BATCH, 600, 2_000, "Bulk")
    batch.keep(4)
    world.run(30)
    steps = []
    while world.now_us < 40 * SECOND_US:
        chats.keep(24)
        batch.keep(4)
        if world.step % 20 == 0:
            steps.append((world.submit(INTERACTIVE, 300, 3, tenant="Nova"), world.step))
        world.run_step()
    world.run(5)
    begun = [(world.story(i).first_planned_step, step) for i, step in steps]
    waits = [None if first is None else first - step + 1 for first, step in begun]
    assert all(wait is not None and wait <= 2 for wait in waits), waits


def test_a_class_has_its_own_slots_under_its_cap_and_pushes_out_nobody_while_some_are_free() -> None:
    world = World(4_000, 8, None, policy=with_class(INTERACTIVE, cap_slots_percent=50), max_model_len=8_192)
    batch = world.many(5, BATCH, 64, 2_000)
    world.run(40)
    chats = world.many(3, INTERACTIVE, 32, 60, tenant="Aurora")
    world.run(5)
    assert all(world.story(chat).first_planned_step is not None for chat in chats)
    assert not any(world.story(i).preempted for i in batch)


def test_a_class_at_its_cap_of_slots_waits_for_its_own_and_pushes_out_no_lower_class() -> None:
    world = World(4_000, 8, None, policy=with_class(INTERACTIVE, cap_slots_percent=50), max_model_len=8_192)
    batch = world.many(4, BATCH, 64, 2_000)
    world.run(20)
    chats = world.many(6, INTERACTIVE, 32, 60, tenant="Aurora")
    world.run(10)
    assert sum(world.story(chat).first_planned_step is not None for chat in chats) == 4
    assert not any(world.story(i).preempted for i in batch)


def test_a_class_in_debt_keeps_no_more_than_its_floors_part_and_one_request_at_least() -> None:
    world = World(400, 8, None, policy=with_class(BATCH, floor_percent=30), check=False, max_model_len=8_192)
    batch = world.many(4, BATCH, 620, 200)  # a tenth of the memory each
    world.run(20)
    state = world.engine._state
    assert [live.request_id for live in beyond_floor(state, BATCH)] == batch[2:], "two of eight slots are a quarter"
    state.classes = with_class(BATCH, floor_percent=1).classes
    assert len(beyond_floor(state, BATCH)) == 3


def test_the_slot_that_a_class_may_not_have_is_for_those_below_it() -> None:
    world = World(4_000, 2, None, policy=with_class(INTERACTIVE, cap_slots_percent=50), check=False)
    chats, batch = Streams(world, INTERACTIVE, 32, 40, "Aurora"), Streams(world, BATCH, 64, 40, "Bulk")
    while world.now_us < 5 * SECOND_US:
        chats.keep(3)
        batch.keep(3)
        world.run_step()
    assert had_us(world, BATCH) >= 0.4 * world.busy_us


def test_slots_of_a_higher_class_do_not_count_against_a_class_that_is_capped_and_shared() -> None:
    rules = with_class(DEFAULT, policy(max_queue_wait_ms=None), cap_slots_percent=50)
    world = World(8_000, 16, None, policy=rules, check=False, max_model_len=8_192)
    world.many(7, INTERACTIVE, 32, 4_000, tenant="Chats")
    world.submit(DEFAULT, 32, 5, tenant="Quiet")
    world.run(20)
    loud = Streams(world, DEFAULT, 64, 400, "Loud")
    used = []
    for _ in range(200):
        loud.keep(20)
        world.run_step()
        used.append(world.engine._state.running.num_in_slots(DEFAULT))
    assert max(used) == 7, "eight less the one that is kept for others"


@pytest.mark.parametrize("bar", [{"concurrency": 1}, {"allowed": False}], ids=["one at once", "not allowed"])
def test_who_waits_for_a_limit_of_its_own_is_no_work_ahead_and_no_overload(bar: dict[str, int]) -> None:
    world = World(4_000, 64, None, check=False, max_model_len=8_192)
    batch = Streams(world, BATCH, 200, 60, "Bulk")
    cell = TenantClassPolicy(tenant_id="Nova", priority_class=DEFAULT, **bar)  # type: ignore[arg-type]
    world.many(300, DEFAULT, 600, 200, tenant="Nova")
    world.run(1)
    world.engine.set_policy(policy(cell, version=2))
    rungs = set()
    while world.now_us < 20 * SECOND_US:
        batch.keep(60)
        world.run_step()
        if world.now_us > 5 * SECOND_US:
            rungs.add(world.engine._state.overload.rung.name)
    assert rungs == {"CALM"}
    assert had_us(world, BATCH) > 10 * SECOND_US


@pytest.mark.parametrize("bar", [{"concurrency": 0}, {"allowed": False}], ids=["none at once", "not allowed"])
def test_who_waits_when_its_tenant_is_barred_waits_on_until_it_is_not(bar: dict[str, int]) -> None:
    world = World(400, 4, None, max_model_len=8_192)
    batch = world.many(10, BATCH, 64, 40, tenant="Nova")
    world.run(10)
    cell = TenantClassPolicy(tenant_id="Nova", priority_class=BATCH, **bar)  # type: ignore[arg-type]
    world.engine.set_policy(policy(cell, version=2))
    world.run(200)
    assert sum(world.story(i).finished is not None for i in batch) == 4, "those who had started"
    late = world.submit(BATCH, 64, 40, tenant="Nova")
    world.run(2)
    assert (refusal := world.story(late).rejected) is not None
    assert refusal.reason is RejectReason.NOT_ALLOWED
    world.engine.set_policy(policy(version=3))
    world.finish()
    assert all(world.story(i).finished is not None for i in batch)


def test_a_governor_that_was_told_to_bear_no_loss_lets_go_when_there_is_none() -> None:
    classes = tuple(replace(row, governor_off_percent=0) for row in gpu_classes())
    governor = Governor(64)
    for second in range(1, 4):
        governor.settle(classes, lambda rank: 40, busy_us=500_000, lost_us=100_000, now_us=second * SECOND_US)
    assert governor.cap(BATCH) < 40
    for second in range(4, 100):
        governor.settle(classes, lambda rank: 40, busy_us=500_000, lost_us=0, now_us=second * SECOND_US)
    assert governor.cap(BATCH) == 64


def test_a_copy_that_is_completed_twice_is_no_result_and_changes_nothing() -> None:
    world = World(64, 8, copies_in_order=False, copy_steps=3)
    world.many(2, BATCH, 400, 12, reproducible=True)  # swapped and not dropped
    world.run(3)
    world.submit(INTERACTIVE, 480, 2, tenant="Aurora")
    world.run_until(lambda: bool(world.plans[-1].swap_out))
    copied = RequestId(world.plans[-1].swap_out[0].request_id)
    plan = world.engine.plan_step(world.now_us)
    tokens = [1 if row.samples else -1 for row in plan.rows]
    with pytest.raises(Misuse, match="completed twice"):
        world.engine.apply_step(
            StepResult(step=plan.step, duration_us=1, sampled_token_ids=tokens, completed_copies=(copied, copied)),
            world.now_us,
        )
    world.engine.apply_step(StepResult(step=plan.step, duration_us=1, sampled_token_ids=tokens), world.now_us)
    world.engine.check_books()
