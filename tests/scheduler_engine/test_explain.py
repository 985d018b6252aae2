"""Why did I wait: every microsecond has one cause, in words and milliseconds, and every decision left its record."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scheduler_engine.events import Lever
from scheduler_engine.explain import Explanation, describe, milliseconds
from scheduler_engine.plan import RowFailure
from scheduler_engine.policy import TenantClassPolicy
from scheduler_engine.record import NOT_OPEN, RECORD_BYTES, Action, Cause, DecisionRecord, RecordRing, pack, unpack_all
from scheduler_engine.request import RequestId
from scheduler_engine.waits import WaitShare
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy


def explained(world: World, request_id: str) -> Explanation:
    found = world.engine.explain(RequestId(request_id))
    assert found is not None
    assert sum(share.duration_us for share in found.queued) == found.queue_us
    assert sum(share.duration_us for share in found.paused) == found.paused_us
    assert found.running_us >= 0
    return found


def causes(shares: tuple[WaitShare, ...]) -> dict[Cause, int]:
    found: Counter[Cause] = Counter()
    for share in shares:
        found[share.cause] += share.duration_us
    return dict(found)


def records(world: World) -> list[DecisionRecord]:
    return unpack_all(world.engine.step_records)


def test_a_record_has_96_bytes_and_comes_back_as_it_was() -> None:
    body = pack(*range(1, 24))
    assert len(body) == RECORD_BYTES == 96
    assert [tuple(record) for record in unpack_all(body + body)] == [tuple(range(1, 24))] * 2


def test_the_ring_keeps_the_newest_and_admits_what_it_has_lost() -> None:
    ring = RecordRing(3)
    for number in range(1, 6):
        assert ring.append(pack(*[number] * 23)) == number
    assert [ring.get(number) and ring.get(number).step for number in range(7)] == [None, None, None, 3, 4, 5, None]  # type: ignore[union-attr]


def test_an_idle_engine_makes_nobody_wait() -> None:
    world = World()
    chat = world.submit(INTERACTIVE, 64, 4)
    world.run(1)
    found = explained(world, chat)
    assert (found.queue_us, found.outcome, found.text) == (0, None, "waited 0 ms")
    world.finish()
    assert explained(world, chat).outcome == "length"
    assert [entry.action for entry in explained(world, chat).timeline] == [
        Action.QUEUED,
        Action.ADMITTED,
        Action.FINISHED,
    ]


def test_who_comes_in_the_middle_of_a_step_waits_for_its_end() -> None:
    world = World()
    world.run(1)
    chat = world.submit(INTERACTIVE, 64, 4)
    world.now_us += 5_500
    world.run(1)
    found = explained(world, chat)
    assert found.queued == (WaitShare(Cause.STEP_UNDER_WAY, None, 5_500),)
    assert found.text == "waited 6 ms: 6 ms for the end of the step that was under way"
    world.finish()
    finished = world.story(chat).finished
    assert finished is not None
    assert finished.counters.waits == (("queued", "step_under_way", "", 5_500),)


def test_a_batch_that_waits_for_slots_is_told_who_has_them() -> None:
    world = World(1_000, 4, policy=policy(patience_steps=None, patience_ms=None))
    world.many(4, DEFAULT, 64, 40)
    world.run(2)
    waiting = world.submit(BATCH, 64, 4)
    world.run(10)
    assert explained(world, waiting).queued[0] == WaitShare(Cause.SLOTS, DEFAULT, explained(world, waiting).queue_us)
    assert explained(world, waiting).text.endswith("for a slot held by the default class")
    world.finish()
    assert explained(world, waiting).queue_us == world.story(waiting).finished.counters.queue_us  # type: ignore[union-attr]


def test_memory_and_another_tenant_are_told_apart() -> None:
    world = World(64, 8, policy=policy(patience_steps=None, patience_ms=None, cap_memory_percent=100))
    world.submit(DEFAULT, 700, 200, tenant="Nova")
    world.run(3)
    first = world.submit(DEFAULT, 400, 8, tenant="Aurora")
    other = world.submit(DEFAULT, 400, 8, tenant="Bulk")
    world.finish()
    waits = {name: causes(explained(world, name).queued) for name in (first, other)}
    assert set(waits[other]) == {Cause.MEMORY}  # a newcomer is first in line
    assert set(waits[first]) == {Cause.OTHER_TENANT}
    assert explained(world, first).text.endswith("behind another tenant with less service")


def test_one_behind_its_own_tenant_is_told_so() -> None:
    world = World(64, 8, policy=policy(patience_steps=None, patience_ms=None, cap_memory_percent=100))
    world.submit(DEFAULT, 700, 200, tenant="Nova")
    world.run(3)
    first = world.submit(DEFAULT, 400, 8, tenant="Nova")
    second = world.submit(DEFAULT, 400, 8, tenant="Nova")
    world.finish()
    assert set(causes(explained(world, first).queued)) == {Cause.MEMORY}
    assert set(causes(explained(world, second).queued)) == {Cause.OWN_TENANT}


def test_memory_that_is_free_but_spoken_for_is_headroom() -> None:
    world = World(64, 8, policy=policy(patience_steps=None, patience_ms=None, cap_memory_percent=100))
    world.submit(DEFAULT, 100, 800, tenant="Nova")
    world.run(3)
    waiting = world.submit(DEFAULT, 300, 400, tenant="Nova")
    world.run(3)
    assert set(causes(explained(world, waiting).queued)) == {Cause.HEADROOM}


def test_a_tenant_at_its_limit_waits_for_itself() -> None:
    cap = TenantClassPolicy(tenant_id="Nova", priority_class=DEFAULT, concurrency=1)
    world = World(policy=policy(cap))
    world.submit(DEFAULT, 64, 20, tenant="Nova")
    world.run(2)
    waiting = world.submit(DEFAULT, 64, 4, tenant="Nova")
    neighbour = world.submit(DEFAULT, 64, 4, tenant="Aurora")
    world.finish()
    assert set(causes(explained(world, waiting).queued)) == {Cause.CONCURRENCY}
    assert explained(world, neighbour).queue_us == 0


def test_a_victim_reads_by_whom_how_and_what_each_lever_would_have_cost() -> None:  # S162
    world = World(64, 8, token_budget=2_048)
    victim = world.submit(BATCH, 700, 200)
    world.run(20)
    chat = world.submit(INTERACTIVE, 512, 8)
    world.finish()
    preempted = next(e for e in explained(world, victim).timeline if e.action is Action.PREEMPTED)
    told = world.story(victim).preempted[0][1]
    assert preempted.record.lever_label == told.lever is Lever.SWAP
    assert preempted.record.resource_label == told.resource
    assert preempted.record.other == 2  # the chat came second
    assert preempted.record.hold_us == NOT_OPEN
    assert 0 < preempted.record.swap_us < preempted.record.recompute_us < NOT_OPEN
    assert preempted.record.wait_us > 1_000_000  # the victim itself would have run for some 200 steps
    assert preempted.text.startswith("was copied to host memory for a request of the interactive class (memory; hold")
    assert explained(world, victim).paused_us > 0
    assert not explained(world, chat).paused


def test_time_in_a_slot_without_a_part_of_the_step_is_a_pause() -> None:
    world = World(2_000, 64, token_budget=2_048)
    world.many(40, BATCH, 64, 400)
    world.run(60)
    world.submit(INTERACTIVE, 512, 8, tenant="Aurora")
    world.run(3)
    held = [name for name, story in world.stories.items() if any(p.lever is Lever.HOLD for _, p in story.preempted)]
    assert held
    share = explained(world, held[0]).paused[0]
    assert (share.cause, share.holder) == (Cause.STEP_TIME, INTERACTIVE)
    world.finish()
    assert explained(world, held[0]).outcome == "length"


def test_refused_and_shed_requests_are_explained_too() -> None:
    world = World()
    too_long = world.submit(BATCH, 5_000, 8)
    world.run(1)
    assert explained(world, too_long).outcome == "never_fits"
    assert explained(world, too_long).timeline[-1].text == "refused: never_fits"
    assert world.engine.explain(RequestId("nobody")) is None


def test_one_that_is_shed_is_told_what_it_waited_for() -> None:
    world = World(1_000, 4, policy=policy(patience_steps=None, patience_ms=None))
    world.many(4, DEFAULT, 64, 400)
    world.run(2)
    impatient = world.submit(DEFAULT, 64, 4, max_queue_wait_us=200_000)
    world.run(60)
    rejected = world.story(impatient).rejected
    assert rejected is not None
    assert [(wait.cause, wait.held_by) for wait in rejected.waits] == [("slots", "default")]
    assert sum(wait.duration_us for wait in rejected.waits) == explained(world, impatient).queue_us >= 200_000
    assert explained(world, impatient).timeline[-1].text == "shed: queue_wait"


def test_who_can_never_fit_pushes_nobody_out_and_the_records_say_what_was_asked_and_free() -> None:  # S32
    world = World(256, 16)
    world.many(10, BATCH, 300, 100)
    world.run(12)
    never = world.submit(INTERACTIVE, 300 * 16, 8)
    world.run(1)
    assert explained(world, never).outcome == "never_fits"
    assert {record.action for record in records(world)} == {Action.REFUSED}
    large = world.submit(INTERACTIVE, 250 * 16, 8)  # it fits, and needs nearly everybody to go
    world.run(1)
    gone = [record for record in records(world) if record.action == Action.PREEMPTED]
    assert {record.other for record in gone} == {11}
    assert all(record.need_blocks == 0 and record.swap_us and record.recompute_us for record in gone)
    world.finish()
    assert explained(world, large).outcome == "length"


def test_a_failed_row_leaves_its_reason() -> None:
    world = World()
    chat = world.submit(INTERACTIVE, 64, 8)
    world.run(2)
    world.fail_next[chat] = RowFailure(RequestId(chat), "not_finite", poison=False)
    world.run(1)
    assert explained(world, chat).timeline[-1].record.resource_label == "failure"
    world.finish()


def test_the_printed_milliseconds_sum_to_the_printed_whole() -> None:
    shares = [WaitShare(Cause.MEMORY, BATCH, us) for us in (1_499, 1_499, 1_499, 500, 3)]
    assert sum(milliseconds(shares)) == 5 == (sum(share.duration_us for share in shares) + 500) // 1_000


@pytest.mark.parametrize("action", list(Action))
def test_every_action_and_every_cause_has_words(action: Action) -> None:
    empty = unpack_all(pack(*[0] * 23))[0]._replace(action=action, holder=1)
    for cause in Cause:
        if cause is not Cause.NONE:
            lever: dict[str, Any] = {"lever": 1} if action is Action.PREEMPTED else {}
            assert describe(empty._replace(cause=cause, **lever))


def test_the_digest_is_that_of_the_decisions() -> None:
    def digest(prompt: int) -> str:
        world = World()
        world.many(3, BATCH, prompt, 20)
        world.submit(INTERACTIVE, 64, 4)
        world.finish()
        return world.engine.digest

    assert digest(100) == digest(100)
    assert digest(100) != digest(101)


def test_a_step_without_decisions_writes_no_record() -> None:
    world = World()
    world.submit(BATCH, 64, 40)
    world.run(3)
    assert records(world) == []
    before = world.engine.digest
    world.run(1)
    assert world.engine.digest != before


def reached(*worlds: World) -> set[Cause]:
    """Causes that somebody in the worlds waited for."""
    found: set[Cause] = set()
    for world in worlds:
        for request_id in world.stories:
            explanation = explained(world, request_id)
            found |= {share.cause for share in (*explanation.queued, *explanation.paused)}
    return found


def test_slow_copies_are_told_from_room_that_is_missing() -> None:
    world = World(64, 8, copies_in_order=False, copy_steps=4)
    world.many(4, BATCH, 200, 200)
    world.run(10)
    for _ in range(4):
        world.submit(INTERACTIVE, 400, 8, tenant="Aurora")
        world.run(6)
    world.finish()
    assert reached(world) >= {Cause.COPY_FENCE, Cause.SAVING}


def test_a_head_that_waits_for_ends_that_are_near_is_patient() -> None:
    world = World(64, 4, token_budget=2_048)
    world.many(4, BATCH, 64, 40)
    world.run(20)
    patient = world.submit(DEFAULT, 64, 8, tenant="Aurora")
    world.finish()
    assert Cause.PATIENCE in causes(explained(world, patient).queued)
    assert "were about to end" in explained(world, patient).text


def test_room_that_is_set_apart_for_a_head_above_is_told() -> None:
    world = World(64, 8, policy=policy(patience_steps=None, patience_ms=None, cap_memory_percent=100))
    world.submit(DEFAULT, 600, 200, tenant="Nova")
    world.run(3)
    world.submit(INTERACTIVE, 600, 8, tenant="Aurora")
    waiting = world.submit(BATCH, 64, 8)
    world.run(5)
    assert causes(explained(world, waiting).queued).keys() == {Cause.EARMARK}


def test_the_last_slots_of_a_class_are_for_others() -> None:
    world = World(4_000, 32)
    world.submit(INTERACTIVE, 64, 4, tenant="Aurora")
    world.many(60, INTERACTIVE, 64, 60, tenant="Nova")
    world.run(20)
    assert Cause.SHARE in reached(world)


def test_batch_that_is_paused_for_an_overload_above_is_told() -> None:
    world = World(400, 8, check=False)
    world.many(300, INTERACTIVE, 512, 60, tenant="Nova")
    world.run(400)
    world.many(4, BATCH, 64, 40)
    world.run(200)
    assert Cause.POLICY_PAUSE in reached(world)
