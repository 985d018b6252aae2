"""Calm: headroom, rest, pins, the governor and the last room of a class (cases S41, S42, S48, S117, S32)."""

from __future__ import annotations

import pytest

from scheduler_engine.entry import TenantMix
from scheduler_engine.fairness import FairnessAccountant
from scheduler_engine.governor import Governor
from scheduler_engine.headroom import Headroom, Pressure
from scheduler_engine.metering import UNIT_BITS, Meter
from scheduler_engine.policy import TenantClassPolicy, gpu_classes
from tests.scheduler_engine.world import BATCH, INTERACTIVE, World, policy

SECOND_US = 1_000_000


# headroom


def chats_in_waves(world: World, num_waves: int) -> list[str]:
    """Every half a second four chats of ten blocks."""
    chats: list[str] = []
    for _ in range(num_waves):
        chats += world.many(4, INTERACTIVE, 120, 16, tenant="Aurora")
        until_us = world.now_us + 500_000
        while world.now_us < until_us:
            world.run_step()
    return chats


def memory_preemptions(world: World, from_step: int) -> int:
    return sum(p.resource.value == "memory" and p.by is not None for e in world.events[from_step:] for p in e.preempted)


def test_s48_batch_leaves_the_room_that_chats_were_seen_to_want_and_chats_find_it() -> None:
    world = World(256, 32, 512, check=False)
    world.many(400, BATCH, 240, 40)
    chats_in_waves(world, 8)  # four seconds: their demand is known
    began = world.step
    chats = chats_in_waves(world, 12)
    num_out = memory_preemptions(world, began)
    assert num_out <= len(chats) // 4, "most find what was kept free for them"
    assert world.engine.load(world.now_us).classes[BATCH].reserve_blocks > 0
    assert all(world.story(chat).ttft_us <= 300_000 for chat in chats if world.story(chat).token_us)


def test_the_reserve_is_what_the_classes_above_held_at_the_90th_percentile_less_what_they_hold_now() -> None:
    headroom = Headroom(1_000)
    for number in range(100):
        headroom.sample([100 if number % 5 == 0 else 20, 0, 0], number * 100_000)
    headroom.sample([20, 0, 0], 10_000_000)
    assert headroom.reserve(0, 10_000_000) == 0, "nobody is above"
    assert headroom.reserve(1, 10_000_000) == headroom.reserve(2, 10_000_000) == 80
    headroom.sample([100, 0, 0], 10_100_000)
    assert headroom.reserve(2, 10_100_000) == 0, "they have it already"
    small = Headroom(140)
    small.sample([100, 0, 0], 0)
    small.sample([0, 0, 0], 100_000)
    assert small.reserve(2, 100_000) in (0, 20), "a seventh at most"


def test_repeated_pressure_turns_into_more_headroom_and_fades() -> None:
    pressure = Pressure()
    for _ in range(32):
        pressure.note(0)
    assert pressure.inflation(0) == 1_024, "a burst is usual"
    for _ in range(4):
        pressure.note(0)
    assert pressure.inflation(0) == 1_024 * 5**4 // 4**4
    assert pressure.inflation(30_000_000) < 1_024 * 2
    assert pressure.inflation(200_000_000) == 1_024


def test_who_was_pushed_out_of_memory_rests_before_it_takes_the_same_room_again() -> None:
    world = World(64, 8, 512, policy=policy(cap_memory_percent=100))
    world.teach(BATCH, output=12)  # 32 blocks each: the pool is full, and the one that stays is there for long
    world.many(2, BATCH, 500, 100)
    world.run(3)
    chat = world.submit(INTERACTIVE, 64, 3, tenant="Aurora")
    world.run_step()
    (victim,) = [i for i in world.board() if world.board()[i] == "on_host"]
    out_us = world.now_us
    world.run_until(lambda: world.story(chat).has_ended)
    assert world.now_us - out_us < 100_000
    world.run_until(lambda: bool(world.story(victim).resumed_steps))
    assert world.now_us - out_us >= 190_000
    assert world.engine.load(world.now_us).policy.num_rests > 0


# pins


@pytest.mark.parametrize(("max_preemptions", "left", "num_out"), [(4, 20, 1), (0, 20, 0), (0, 300, 1)])
def test_one_that_gave_way_often_enough_is_left_alone_while_a_natural_end_keeps_the_promise(
    max_preemptions: int, left: int, num_out: int
) -> None:
    world = World(1_000, 2, 512, policy=policy(max_preemptions=max_preemptions))
    world.submit(BATCH, 64, 400)
    world.submit(BATCH, 64, left)
    world.run(3)
    chat = world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.run_until(lambda: bool(world.story(chat).token_ids))
    assert world.levers()["hold"] == num_out
    assert world.story(chat).ttft_us <= 300_000


def test_nobody_is_pushed_out_for_another_class_more_often_than_its_class_bears_in_calm() -> None:
    world = World(128, 8, 512)
    batch = world.many(12, BATCH, 300, 150)
    for _ in range(40):
        world.run(12)
        world.submit(INTERACTIVE, 200, 8, tenant="Aurora")
    world.finish()
    counts = [sum(p.resource.value != "step_time" for _, p in world.story(i).preempted) for i in batch]
    assert max(counts) <= 4
    assert sum(count > 0 for count in counts) <= 6


# the governor


def test_the_governor_cuts_a_class_while_switching_costs_too_much_and_lets_it_grow_again() -> None:
    governor, classes = Governor(64), gpu_classes()
    for second in (1, 2, 3):
        lost_us = SECOND_US // 10
        governor.settle(classes, [0, 0, 40].__getitem__, busy_us=SECOND_US, lost_us=lost_us, now_us=second * SECOND_US)
    assert [governor.cap(rank) for rank in (INTERACTIVE, BATCH)] == [64, 20]  # 40 less a fifth, three times
    assert governor.is_full(BATCH, 20)
    assert not governor.is_full(INTERACTIVE, 64)
    for second in range(4, 14):
        governor.settle(classes, [0, 0, 20].__getitem__, busy_us=SECOND_US, lost_us=0, now_us=second * SECOND_US)
    assert governor.cap(BATCH) == 30
    assert governor.lost_per_mille == 0


def oversubscribed(governor_on_percent: int) -> tuple[int, World]:
    """Batch for twice the pool, no host memory, and outputs that nobody foresees; tokens in twelve seconds."""
    edited = policy(governor_on_percent=governor_on_percent, cap_memory_percent=100)
    world = World(128, 32, 512, policy=edited, num_host_blocks=0, check=False)
    world.teach(BATCH, output=8)
    asked = world.many(64, BATCH, 200, 500)
    until_us = world.now_us + 12 * SECOND_US
    while world.now_us < until_us:
        world.run_step()
    return sum(len(world.story(i).token_ids) for i in asked), world


def test_s42_under_oversubscription_little_goes_into_switching_and_the_governor_costs_nothing() -> None:
    tokens, world = oversubscribed(5)
    unlimited, _ = oversubscribed(100)
    assert tokens >= 0.95 * unlimited
    assert world.engine.load(world.now_us).policy.switching_per_mille <= 50


def pushed_about(governor_on_percent: int) -> World:
    """Every 400 ms a chat that wants half of a pool that batch has filled; a host pool behind a slow link."""
    edited = policy(governor_on_percent=governor_on_percent)
    world = World(256, 32, 512, policy=edited, bytes_per_block=15_000_000, check=False)
    world.teach(BATCH, output=100)
    world.many(200, BATCH, 200, 100)
    next_us, until_us = world.now_us, world.now_us + 15 * SECOND_US
    while world.now_us < until_us:
        if world.now_us >= next_us:
            world.submit(INTERACTIVE, 2_000, 8, tenant="Aurora")
            next_us += 400_000
        world.run_step()
    return world


def test_s41_the_governor_holds_switching_under_its_mark_where_nothing_else_does() -> None:
    governed, free = (pushed_about(percent).engine for percent in (5, 100))
    governed_load, free_load = governed.load(0).policy, free.load(0).policy
    assert governed_load.switching_per_mille <= 50 < free_load.switching_per_mille
    counts = [sum(c.count for c in load.preemptions if c.resource == "memory") for load in (governed_load, free_load)]
    assert counts[0] < 0.6 * counts[1]


# the last room of a class


def quiet_among_flood(*, is_known: bool) -> tuple[int, World]:
    """Steps until a quiet tenant's chat starts in a class that another floods."""
    world = World(4_000, 64, 866, policy=policy(max_queue_wait_ms=None), check=False)
    if is_known:
        world.submit(INTERACTIVE, 64, 2, tenant="Aurora")
        world.finish()
    world.many(600, INTERACTIVE, 200, 150, tenant="Nova")
    world.run(45)
    waits = []
    for _ in range(6):
        chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
        asked = world.step
        world.run_until(lambda chat=chat: world.story(chat).first_planned_step is not None)
        waits.append(world.step - asked)
        world.run(6)
    return max(waits), world


def test_s117_a_quiet_tenant_finds_a_slot_at_once_in_a_class_that_another_floods() -> None:
    steps, world = quiet_among_flood(is_known=True)
    assert steps <= 2
    load = world.engine.load(world.now_us)
    assert load.policy.num_kept_out > 0
    assert load.num_free_slots <= 4


def test_s117_a_quiet_tenant_finds_memory_at_once_in_a_class_that_another_fills() -> None:
    world = World(256, 64, 866, policy=policy(max_queue_wait_ms=None), check=False)
    world.submit(INTERACTIVE, 64, 2, tenant="Aurora")
    world.finish()
    world.many(200, INTERACTIVE, 200, 100, tenant="Nova")  # 19 blocks each to their end
    world.run(30)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    asked = world.step
    world.run_until(lambda: world.story(chat).first_planned_step is not None)
    assert world.step - asked <= 2
    assert world.engine.load(world.now_us).policy.num_kept_out > 0


def test_a_tenant_alone_in_its_class_has_all_of_it() -> None:
    world = World(4_000, 64, 866, policy=policy(max_queue_wait_ms=None), check=False)
    world.many(200, INTERACTIVE, 200, 150, tenant="Nova")
    world.run(60)
    assert world.engine.load(world.now_us).num_free_slots == 0
    mix = TenantMix()
    for now_us, tenant in ((0, "Nova"), (1, "Nova")):
        mix.note(tenant, now_us)
    assert not mix.is_mixed(2)
    mix.note("Aurora", 3)
    assert mix.is_mixed(60_000_003)
    assert not mix.is_mixed(60_000_004)


def test_the_step_that_brings_a_quiet_tenants_first_token_is_not_filled_up_by_those_who_have_their_share() -> None:
    world = World(4_000, 32, 866, policy=policy(max_queue_wait_ms=None), check=False)
    world.submit(INTERACTIVE, 64, 2, tenant="Aurora")
    world.finish()
    world.many(400, INTERACTIVE, 900, 20, tenant="Nova")
    world.run(60)
    chat = world.submit(INTERACTIVE, 64, 8, tenant="Aurora")
    world.run_until(lambda: bool(world.story(chat).token_ids))
    plan = world.plans[-1]
    prefills = {row.request_id for row in plan.rows if len(row.token_ids) > 1}
    assert prefills == {chat}


# nobody buys capacity by a label


def test_a_tenant_over_its_share_of_the_whole_device_does_not_push_out_one_under_its_own() -> None:
    world = World(1_000, 2, 512, policy=policy(floor_percent=0))
    world.submit(INTERACTIVE, 64, 300, tenant="Nova")
    world.run(150)  # all of the device so far
    other = world.submit(BATCH, 64, 300, tenant="Bulk")
    world.run(3)
    greedy = world.submit(INTERACTIVE, 64, 10, tenant="Nova")
    world.run(20)
    assert not world.story(other).preempted, "it calls all its work urgent, and waits for its own slot"
    assert world.story(greedy).first_planned_step is None
    modest = world.submit(INTERACTIVE, 64, 10, tenant="Aurora")
    world.run(2)
    assert world.story(other).preempted, "one that had nothing yet may"
    assert world.story(modest).first_planned_step is not None
    world.finish()


@pytest.mark.parametrize(("weight", "is_over"), [(1, True), (2, True), (4, False)])
def test_the_share_of_a_tenant_goes_by_weight_over_all_classes_and_ten_seconds(weight: int, is_over: bool) -> None:
    accountant = FairnessAccountant([Meter(), Meter(), Meter()])
    nova, bulk = accountant.account(INTERACTIVE, "Nova"), accountant.account(BATCH, "Bulk")
    cell = TenantClassPolicy(tenant_id="Nova", priority_class=INTERACTIVE, weight=weight)
    accountant.set_policy(nova, cell)
    for account, charge_us in ((nova, 750_000), (bulk, 250_000)):
        accountant.enter(account)
        account.charge(charge_us << UNIT_BITS)
    accountant.busy_us = SECOND_US
    assert accountant.is_over(nova, 1) == accountant.is_over(nova, 5_000_001) == is_over
    assert not accountant.is_over(nova, 10_000_002), "what was long ago is forgiven"


# service on other workers


def test_service_on_other_workers_orders_as_if_it_had_been_had_here_and_is_charged_to_nobody() -> None:
    world = World(1_000, 1, 512, policy=policy(bypass_limit=0))
    world.submit(BATCH, 64, 20, tenant="Teacher")
    world.run(2)
    here = world.submit(BATCH, 64, 4, tenant="Bulk")
    elsewhere = world.submit(BATCH, 64, 4, tenant="Nova")  # who wakes last comes first, had it not been served
    for gpu_us in (60 * SECOND_US, 63 * SECOND_US):  # what was had before it is first told is past
        world.engine.set_service_elsewhere(BATCH, "Nova", gpu_us)
    world.run_until(lambda: world.story(elsewhere).first_planned_step is not None)
    assert world.story(here).has_ended
    assert world.engine.load(world.now_us).charged_us == world.busy_us
    world.engine.set_service_elsewhere(BATCH, "Nova", 1 * SECOND_US)  # a peer that began anew takes nothing back
    world.finish()
