"""The holders of what is scarce, one by one, against the plainest model of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_engine.blocks import BlockPool
from scheduler_engine.calibration import ONE, WaitCalibration
from scheduler_engine.cost import FittedCost
from scheduler_engine.errors import BrokenBooks
from scheduler_engine.events import RejectReason
from scheduler_engine.fairness import SERVICE_UNITS_PER_US, Account, FairnessAccountant
from scheduler_engine.floors import Floors
from scheduler_engine.lengths import LengthHistory
from scheduler_engine.live import LiveRequest
from scheduler_engine.metering import UNITS_PER_US, Meter
from scheduler_engine.overload import Overload
from scheduler_engine.peak import PeakBook
from scheduler_engine.policy import PriorityClass, gpu_classes
from scheduler_engine.queues import ClassQueue
from scheduler_engine.request import Request, RequestId
from tests.scheduler_engine.world import BATCH, TOY


def live(account: Account, number: int, *, deadline_us: int = 0, prompt: int = 10, output: int = 10) -> LiveRequest:
    request = Request(
        request_id=RequestId(f"r{number}"),
        tenant_id=account.tenant_id,
        priority_class=account.priority_class,
        prompt_token_ids=range(prompt),
        max_tokens=output,
    )
    made = LiveRequest(request, account, sequence_number=number, arrival_us=0)
    made.deadline_us = deadline_us
    made.estimated_gpu_us = 1 + number
    return made


# blocks


def test_a_block_has_one_place_at_a_time() -> None:
    pool = BlockPool("device", 10)
    mine, yours = pool.take(4), pool.take(3)
    pool.give(mine[2:])
    pool.fence(RequestId("yours"), yours)
    assert (pool.num_free, pool.num_owned, pool.num_fenced) == (5, 2, 3)
    pool.check_books({RequestId("mine"): mine[:2]})
    pool.lift_fence(RequestId("yours"))
    assert pool.num_free == 8
    pool.check_books({RequestId("mine"): mine[:2]})


def test_taking_more_than_is_free_and_fencing_twice_are_broken_books() -> None:
    pool = BlockPool("device", 2)
    blocks = pool.take(2)
    with pytest.raises(BrokenBooks, match="1 blocks taken, 0 free"):
        pool.take(1)
    pool.fence(RequestId("a"), blocks[:1])
    with pytest.raises(BrokenBooks, match="already has a fence"):
        pool.fence(RequestId("a"), blocks[1:])


def test_a_block_given_twice_or_lost_is_found() -> None:
    pool = BlockPool("device", 4)
    blocks = pool.take(2)
    with pytest.raises(BrokenBooks, match="3 blocks found, 4 exist"):
        pool.check_books({RequestId("a"): blocks[:1]})
    with pytest.raises(BrokenBooks, match="both owned by a and owned by b"):
        pool.check_books({RequestId("a"): blocks, RequestId("b"): blocks[:1]})
    pool.give(blocks[:1])
    pool.give(blocks[:1])
    with pytest.raises(BrokenBooks, match="both free and free"):
        pool.check_books({RequestId("a"): blocks[1:]})


# queues


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "remove", "charge", "pop"]), st.integers(0, 3), st.integers(0, 9)),
        max_size=80,
    )
)
def test_the_head_of_a_class_is_the_least_key_of_the_tenant_with_the_least_service(
    moves: list[tuple[str, int, int]],
) -> None:
    queue = ClassQueue()
    accounts = [Account(BATCH, f"t{i}", Meter()) for i in range(4)]
    waiting: list[LiveRequest] = []
    for number, (move, which, amount) in enumerate(moves):
        match move:
            case "push":
                waiting.append(live(accounts[which], number, deadline_us=amount))
                queue.push(waiting[-1])
            case "remove" if waiting:
                queue.remove(waiting.pop(amount % len(waiting)))
            case "pop" if waiting:
                head = queue.head()
                assert head is not None
                waiting.remove(head)
                queue.remove(head)
            case "charge":
                accounts[which].charge(amount * UNITS_PER_US)
        queue.check_books()
        least = min((one.account.service for one in waiting), default=None)
        head = queue.head()
        if head is None:
            assert least is None
        else:
            assert head.account.service == least
            assert head.order_key == min(one.order_key for one in waiting if one.account is head.account)
            rivals = [one for one in waiting if one.account.service == least]
            assert head.order_key == min(one.order_key for one in rivals), "between equals the oldest promise"


def test_removing_almost_all_of_a_long_line_leaves_the_rest_in_order() -> None:
    queue, account = ClassQueue(), Account(BATCH, "Bulk", Meter())
    lives = [live(account, number) for number in range(2_000)]
    for one in lives:
        queue.push(one)
    for one in lives[:1_990]:
        queue.remove(one)
    queue.check_books()
    left = []
    while (head := queue.head()) is not None:
        left.append(head.sequence_number)
        queue.remove(head)
    assert left == list(range(1_990, 2_000))


# peak memory


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), max_size=6),
    st.tuples(st.integers(1, 90), st.integers(1, 60)),
    st.integers(0, 30),
)
def test_the_peak_is_that_of_a_simulation_to_within_a_block_per_request(
    running: list[tuple[int, int]], newcomer: tuple[int, int], num_ticks: int
) -> None:
    book, account = PeakBook(16), Account(BATCH, "Bulk", Meter())
    now = []
    for number, (prompt, output) in enumerate(running):
        book.add(live(account, number, prompt=prompt, output=output))
        now.append((prompt + num_ticks, output - num_ticks))
    for _ in range(num_ticks):
        book.tick()
    alive = [(have, rest) for have, rest in now if rest > 0]
    peak = book.peak_blocks(2, have=newcomer[0], remaining=newcomer[1])
    requests = [*alive, newcomer]
    exact = max(
        sum(-(-(have + t) // 16) for have, rest in requests if rest >= t)
        for t in range(max(r for _, r in requests) + 1)
    )
    if len(alive) == len(now):  # those past their expected end are still there and still counted
        assert peak <= exact + len(requests)
    assert peak >= exact - len(requests)


def test_lower_classes_do_not_count_in_the_peak_of_a_higher_one() -> None:
    book = PeakBook(16)
    book.add(live(Account(BATCH, "Bulk", Meter()), 1, prompt=160, output=16))
    assert book.peak_blocks(0, have=16, remaining=16) == 2
    assert book.peak_blocks(2, have=16, remaining=16) == 13


# lengths, cost, calibration


def test_an_output_is_expected_to_be_like_those_before_it_given_how_far_it_came() -> None:
    history = LengthHistory()
    assert history.estimate(num_output=0, limit=500) == 500
    for length in [20] * 8 + [100] * 2:
        history.observe(length)
    assert history.estimate(num_output=0, limit=500) == 20
    assert history.estimate(num_output=30, limit=500) == 100
    assert history.estimate(num_output=30, limit=50) == 50
    assert history.estimate(num_output=200, limit=500) == 250
    for length in range(300, 364):
        history.observe(length)
    assert history.estimate(num_output=0, limit=500) >= 340, "only the last 64 count"


def test_the_cost_follows_a_device_that_changes_its_speed_and_shrugs_at_a_hiccup() -> None:
    cost = FittedCost(TOY, 1_000)

    def step(speed: int) -> None:
        decode_ns, prefill_ns = cost.base_ns + cost.decode_ns(10, 4_000), cost.prefill_ns(0, 512)
        taken_ns = speed * (6_000_000 + 10 * 30_000 + 4_000 * 65 + 512 * 45_065) // 10
        cost.observe(decode_ns=decode_ns, prefill_ns=prefill_ns, copy_ns=0, duration_us=taken_ns // 1_000)

    step(10)
    assert (cost.base_ns, cost.prefill_ns(0, 512)) == (6_000_000, 512 * 45_065)
    for _ in range(60):
        step(25)
    assert abs(cost.base_ns + cost.decode_ns(10, 4_000) + cost.prefill_ns(0, 512) - 74_080_000) <= 1_500_000
    before_ns = cost.prefill_ns(0, 512)
    step(900)
    assert cost.prefill_ns(0, 512) <= before_ns * 9 // 8


def test_decodes_and_prompts_are_fitted_apart() -> None:
    cost = FittedCost(TOY, 1_000)
    for i in range(200):
        num_prefill = 512 if i % 2 else 0
        taken_ns = 6_000_000 + 300_000 + 260_000 + 2 * 45_065 * num_prefill  # prompts cost twice what was said
        decode_ns, prefill_ns = cost.base_ns + cost.decode_ns(10, 4_000), cost.prefill_ns(0, num_prefill)
        cost.observe(decode_ns=decode_ns, prefill_ns=prefill_ns, copy_ns=0, duration_us=taken_ns // 1_000)
    assert 0.95 * 6_000_000 <= cost.base_ns <= 1.05 * 6_000_000
    assert 1.95 * 23_073_280 <= cost.prefill_ns(0, 512) <= 2.05 * 23_073_280
    assert cost.prefill_fitting(cost.prefill_ns(0, 300), start=0, most=512) in range(295, 301)


def test_predicted_waits_learn_their_median_and_their_ninetieth_percentile() -> None:
    calibration = WaitCalibration()
    for round_number in range(3_000):
        calibration.observe(predicted_us=10_000, actual_us=10_000 + 1_000 * (round_number % 10))
    assert 1.3 * ONE <= calibration.q50 <= 1.7 * ONE
    assert 1.7 * ONE <= calibration.q90 <= 2.1 * ONE


# charges and floors


def test_an_account_orders_by_charge_over_weight_and_begins_to_wait_at_the_level_of_those_who_do() -> None:
    accountant = FairnessAccountant([Meter(), Meter(), Meter()])
    busy, sleeper = accountant.account(BATCH, "Bulk"), accountant.account(BATCH, "Nova")
    busy.weight = 2
    accountant.enter(busy)
    busy.charge(1_000 * UNITS_PER_US)
    assert busy.service == 500 * SERVICE_UNITS_PER_US
    accountant.begin_to_wait(sleeper, busy, ())
    assert sleeper.service == busy.service - 1
    busy.charge(1_000 * UNITS_PER_US)
    accountant.begin_to_wait(sleeper, busy, ())
    assert sleeper.service == busy.service - 1
    accountant.busy_us = 2_000
    accountant.check_books()
    accountant.busy_us = 2_001
    with pytest.raises(BrokenBooks, match="charged 2000 us of 2001"):
        accountant.check_books()


def test_where_nobody_waits_who_begins_to_is_level_with_the_most_that_anybody_had() -> None:
    accountant = FairnessAccountant([Meter(), Meter(), Meter()])
    runs, left, comes = (accountant.account(BATCH, name) for name in ("Bulk", "Nova", "Aurora"))
    for account, us in ((runs, 300), (left, 500)):
        accountant.enter(account)
        accountant.note_start(account)
        account.charge(us * UNITS_PER_US)
        accountant.serve(BATCH, us * UNITS_PER_US)
    accountant.begin_to_wait(comes, None, [runs, left])
    assert comes.service == left.service
    accountant.note_end(left)
    accountant.leave(left)
    runs.charge(100 * UNITS_PER_US)
    later = accountant.account(BATCH, "Sol")
    accountant.begin_to_wait(later, None, [runs])
    assert later.service == left.service > runs.service


def test_a_class_without_service_is_in_debt_after_its_window_and_not_while_a_class_above_is_refused() -> None:
    overload = Overload()
    floors, classes = Floors(overload), gpu_classes()
    step = {"served_us": [100_000, 0, 0], "has_work": [True, False, True]}
    now_us = 0
    while not floors.in_debt(2):
        floors.settle(classes, **step)
        now_us += 100_000
    assert 9_900_000 <= now_us <= 10_400_000
    assert not floors.in_debt(1)
    overload.note_shed(0, RejectReason.LATE, now_us, of_capacity=True)
    overload.settle(late_percent=80, batch_has_work=True, now_us=now_us)
    assert not floors.in_debt(2)
    overload.settle(late_percent=0, batch_has_work=True, now_us=now_us + 2_000_001)
    assert floors.in_debt(2)
    floors.settle(classes, served_us=[0, 0, 100_000], has_work=[True, False, True])
    assert not floors.in_debt(2), "one step has paid for it"
    assert PriorityClass.BATCH == 2
