"""Overload: what is taken from whom, in which order, and given back (cases S87, S91, S120, S122, S127, S132)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from scheduler_engine.events import FinishReason, RejectReason
from scheduler_engine.overload import MAX_PAUSE_US, Overload, Rung
from scheduler_engine.returns import RETRY_MAX_US, ReturnBook, spread
from scheduler_engine.value import ONE, ValueLevels
from tests.scheduler_engine.world import BATCH, INTERACTIVE, World, policy

SECOND_US = 1_000_000


@dataclass
class Crowd:
    """Clients of three tenants with a deadline of a second each, who come back when they are told to, once."""

    world: World
    per_second: int
    values: dict[str, int]
    retries: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    returned: int = 0
    kept: int = 0
    late: int = 0
    without_hint: int = 0
    _next_us: int = 0
    _number: int = 0
    _back: list[tuple[int, str]] = field(default_factory=list)
    _open: list[tuple[str, str, bool]] = field(default_factory=list)

    def run(self, until_us: int) -> None:
        while self.world.now_us < until_us:
            self._arrive()
            self.world.run_step()
            self._look()

    def _arrive(self) -> None:
        world = self.world
        while self._next_us <= world.now_us:
            tenant = tuple(self.values)[self._number % len(self.values)]
            self._number += 1
            self.asked[tenant] += 1
            self._ask(tenant, is_return=False)
            self._next_us += SECOND_US // self.per_second
        for entry in [entry for entry in self._back if entry[0] <= world.now_us]:
            self._back.remove(entry)
            self.returned += 1
            self._ask(entry[1], is_return=True)

    def _ask(self, tenant: str, *, is_return: bool) -> None:
        name = self.world.submit(
            INTERACTIVE,
            600,
            8,
            tenant=tenant,
            hard_deadline_us=SECOND_US,
            value_micros=self.values[tenant],
            is_return=is_return,
        )
        self._open.append((name, tenant, is_return))

    def _look(self) -> None:
        still = []
        for name, tenant, is_return in self._open:
            story = self.world.story(name)
            if story.rejected is not None:
                hint_us = story.rejected.retry_after_us
                self.without_hint += hint_us is None
                if hint_us is not None and self.retries and not is_return:
                    self._back.append((self.world.now_us + hint_us, tenant))
            elif story.token_us:
                self.kept += is_return
                is_in_time = story.ttft_us <= SECOND_US
                self.in_time[tenant] += is_in_time and not is_return
                self.late += not is_in_time
            else:
                still.append((name, tenant, is_return))
        self._open = still


VALUES = {"gold": 100, "silver": 10, "bronze": 1}


def crowded(per_second: int = 60, values: dict[str, int] | None = None, **fields: bool) -> Crowd:
    world = World(4_000, 64, 866, check=False)  # about 31 such requests a second
    return Crowd(world, per_second, VALUES if values is None else values, **fields)


def test_in_overload_the_lowest_value_is_refused_first_and_the_highest_served() -> None:
    crowd = crowded(retries=False)
    crowd.run(12 * SECOND_US)
    served = {tenant: crowd.in_time[tenant] / crowd.asked[tenant] for tenant in VALUES}
    assert served["gold"] >= 0.94
    assert served["gold"] > served["silver"] + 0.3 > served["bronze"] + 0.3
    assert crowd.late <= 0.01 * sum(crowd.in_time.values())


def test_where_all_are_worth_the_same_value_changes_nothing_and_tenants_share() -> None:
    crowd = crowded(values=dict.fromkeys(VALUES, 7), retries=False)
    crowd.run(12 * SECOND_US)
    served = [crowd.in_time[tenant] / crowd.asked[tenant] for tenant in VALUES]
    assert max(served) - min(served) <= 0.08
    assert sum(crowd.in_time.values()) >= 0.93 * 31 * 12


def test_s122_who_was_told_when_to_come_back_is_let_in_then() -> None:
    crowd = crowded(per_second=45)
    crowd.run(20 * SECOND_US)
    assert crowd.returned >= 60
    assert crowd.kept >= 0.9 * crowd.returned
    assert crowd.without_hint == 0
    load = crowd.world.engine.load(crowd.world.now_us).classes[INTERACTIVE]
    assert load.num_promises_kept >= 0.9 * (load.num_promises_kept + load.num_promises_broken) > 0


def test_s120_ten_thousand_at_once_are_answered_in_one_step_and_served_at_capacity() -> None:
    world = World(4_000, 64, 866, check=False)
    asked = world.many(10_000, INTERACTIVE, 600, 8, tenant="Nova", hard_deadline_us=SECOND_US)
    world.run_step()
    refused = [i for i in asked if world.story(i).rejected is not None]
    assert len(refused) > 9_900
    assert all(world.story(i).rejected.retry_after_us >= SECOND_US for i in refused)
    world.finish()
    served = [i for i in asked if world.story(i).token_us]
    assert len(served) >= 20
    assert all(world.story(i).ttft_us <= SECOND_US for i in served)


def test_s132_five_hundred_refused_in_a_second_come_back_no_faster_than_they_can_be_served() -> None:
    world = World(4_000, 64, 866, check=False)
    refused = world.many(500, INTERACTIVE, 600, 8, tenant="Nova", hard_deadline_us=SECOND_US)
    world.run_step()
    seconds = Counter(s.rejected.retry_after_us // SECOND_US for s in map(world.story, refused) if s.rejected)
    assert max(seconds.values()) <= 1.1 * 31


def test_s127_a_request_that_has_streamed_is_never_cut_in_overload() -> None:
    crowd = crowded(per_second=90)
    batch = crowd.world.many(6, BATCH, 400, 300)
    crowd.world.run(20)
    assert all(crowd.world.story(i).token_ids for i in batch)
    crowd.run(8 * SECOND_US)
    assert not any(crowd.world.story(i).has_ended for i in batch), "batch is suspended"
    crowd.per_second, crowd.retries = 1, False
    crowd._back.clear()
    crowd.world.finish()
    assert all(crowd.world.story(i).finished.reason is FinishReason.LENGTH for i in batch)
    cut = [s for s in crowd.world.stories.values() if s.token_ids and s.rejected is not None]
    assert not cut


def test_batch_is_suspended_while_chats_are_refused_and_comes_back_with_calm() -> None:
    crowd = crowded(per_second=60, retries=False)
    world = crowd.world
    batch = world.many(8, BATCH, 200, 2_000)
    world.run(10)
    crowd.run(4 * SECOND_US)
    policy_load = world.engine.load(world.now_us).policy
    assert policy_load.rung == Rung.INTERACTIVE_REFUSED.name.lower()
    assert policy_load.num_batch_pauses == 1
    tokens = sum(len(world.story(i).token_ids) for i in batch)
    crowd.run(6 * SECOND_US)
    assert sum(len(world.story(i).token_ids) for i in batch) == tokens
    calm_us = world.now_us
    world.run_until(lambda: sum(len(world.story(i).token_ids) for i in batch) > tokens)
    assert world.now_us - calm_us <= 3_500_000, "two seconds of calm, once the queue is gone"
    assert world.engine.load(world.now_us).policy.batch_paused_us >= 4 * SECOND_US


def test_batch_that_waits_is_not_let_in_while_the_queue_above_is_too_long() -> None:
    world = World(4_000, 64, 866, check=False, policy=policy(max_queue_wait_ms=None))
    world.many(200, INTERACTIVE, 600, 8, tenant="Nova")  # six seconds of work, nobody in a hurry
    world.run(40)  # half a second and more of it
    batch = world.many(4, BATCH, 100, 10)
    world.run(30)
    assert world.engine.load(world.now_us).policy.rung in ("batch_paused", "batch_suspended")
    assert all(world.story(i).first_planned_step is None for i in batch)
    world.finish()
    assert world.engine.load(world.now_us + 1).policy.batch_paused_us > 0


def test_a_burst_that_drains_at_once_pauses_nobody() -> None:
    world = World(4_000, 64, 866, check=False)
    world.submit(BATCH, 100, 400)
    for _ in range(10):
        world.many(14, INTERACTIVE, 600, 8, tenant="Nova")  # 400 ms of work, more than the target
        world.run(60)
    assert world.engine.load(world.now_us).policy.num_batch_pauses == 0


def test_a_pause_has_an_end_after_which_batch_has_its_floor_however_long_the_overload() -> None:
    overload = Overload()
    now_us = 0
    while now_us <= MAX_PAUSE_US + SECOND_US:
        overload.note_shed(INTERACTIVE, RejectReason.LATE, now_us, of_capacity=True)
        overload.settle(late_percent=300, batch_has_work=True, now_us=now_us)
        if now_us == SECOND_US:
            assert overload.is_suspended
            assert overload.takes_floor(BATCH)
        now_us += SECOND_US
    assert overload.rung is Rung.INTERACTIVE_REFUSED
    assert not overload.is_paused
    assert not overload.takes_floor(BATCH)
    assert abs(overload.paused_us - MAX_PAUSE_US) <= SECOND_US


@pytest.mark.parametrize(
    ("late_percent", "rung"), [(99, Rung.CALM), (101, Rung.BATCH_PAUSED), (201, Rung.BATCH_SUSPENDED)]
)
def test_each_rung_has_its_mark_and_is_left_after_two_seconds_below_half(late_percent: int, rung: Rung) -> None:
    overload = Overload()
    for now_us in (0, 400_000):
        overload.settle(late_percent=late_percent, batch_has_work=False, now_us=now_us)
    assert overload.rung is Rung.CALM, "not sustained yet"
    overload.settle(late_percent=late_percent, batch_has_work=False, now_us=500_000)
    assert overload.rung is rung
    for now_us in (2_000_000, 4_000_000):
        overload.settle(late_percent=60, batch_has_work=False, now_us=now_us)
        assert overload.rung is rung, "above half of the mark"
    overload.settle(late_percent=10, batch_has_work=False, now_us=5_900_000)
    assert overload.rung is rung
    overload.settle(late_percent=10, batch_has_work=False, now_us=6_000_001)
    assert overload.rung is Rung.CALM


def test_s87_batch_that_has_waited_long_stays_batch_and_lives_on_its_floor() -> None:
    world = World(256, 4, 512, policy=policy(max_queue_wait_ms=None), check=False)
    old = world.many(6, BATCH, 200, 40)
    chats: list[str] = []
    while world.now_us < 25 * SECOND_US:
        chats = [chat for chat in chats if not world.story(chat).has_ended]
        chats += world.many(5 - len(chats), INTERACTIVE, 200, 40, tenant="Nova")
        world.run_step()
    late_chat = world.submit(INTERACTIVE, 100, 4, tenant="Aurora")
    asked = world.step
    world.run_until(lambda: world.story(late_chat).first_planned_step is not None)
    assert world.step - asked <= 45, "the end of the next chat: age has not made batch urgent"
    assert any(world.story(i).first_planned_step is not None for i in old), "S91: the floor is a trickle"


# the books behind them


def test_appointments_are_as_far_apart_as_their_work_takes_and_are_redeemed_once() -> None:
    book = ReturnBook()
    hints = [book.appoint("Nova", wait_us=0, cost_us=100_000, salt=i, now_us=0) for i in range(5)]
    assert hints == [1_000_000, 1_400_000, 1_800_000, 2_200_000, 2_600_000]  # a quarter of the device
    assert not book.redeem("Nova", 999_999)
    assert not book.redeem("Aurora", 1_000_000)
    assert book.redeem("Nova", 1_000_000)
    assert not book.redeem("Nova", 1_000_000)
    assert book.redeem("Nova", 1_400_000)
    assert not book.redeem("Nova", 60_000_000), "those who did not come have lost their turn"


def test_a_tenant_with_many_refusals_does_not_put_off_the_turns_of_another() -> None:
    book = ReturnBook()
    for i in range(1_000):
        book.appoint("Nova", wait_us=0, cost_us=100_000, salt=i, now_us=0)
    assert book.appoint("Aurora", wait_us=0, cost_us=100_000, salt=0, now_us=0) == 1_000_000


def test_promises_that_cannot_be_kept_make_the_next_ones_wider_apart() -> None:
    book = ReturnBook()
    for _ in range(10):
        book.note(is_kept=False)
    first, second = (book.appoint("Nova", wait_us=0, cost_us=100_000, salt=i, now_us=0) for i in range(2))
    assert second - first > 1_000_000
    for _ in range(1_000):
        book.note(is_kept=True)
    second, third = (book.appoint("Nova", wait_us=0, cost_us=100_000, salt=i, now_us=0) for i in range(2))
    assert third - second < 300_000
    assert (book.num_kept, book.num_broken) == (1_000, 10)


def test_beyond_ten_minutes_nothing_is_promised_and_the_times_are_spread() -> None:
    book = ReturnBook()
    hints = {book.appoint("Nova", wait_us=RETRY_MAX_US + 1, cost_us=1, salt=i, now_us=0) for i in range(200)}
    assert len(hints) > 100
    assert min(hints) >= RETRY_MAX_US
    assert not book.redeem("Nova", RETRY_MAX_US + 100_000_000)
    assert spread(wait_us=0, salt=0) >= 1_000_000


def test_the_door_closes_sooner_for_the_lower_value() -> None:
    values = ValueLevels()
    for value in (1, 10, 100):
        values.note(value, 0)
    shares = [values.share(v, has_returns=False, is_return=False, now_us=1) for v in (1, 10, 100)]
    assert shares == sorted(shares)
    assert (shares[0], shares[2]) == (ONE // 2, ONE)
    back = values.share(1, has_returns=True, is_return=True, now_us=1)
    assert shares[1] < back < shares[2], "who was told to come back goes before all but the dearest"
    alone = values.share(1, has_returns=False, is_return=False, now_us=20_000_000)
    assert alone == ONE, "the others were not seen for ten seconds"
