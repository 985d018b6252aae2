"""The live picture: what a frame says of the snapshots that came, and of those that stayed away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.console.board import LiveBoard
from gateway.console.feed import READ_PERIOD_US, LiveFeed
from gateway.console.quantiles import quantile_ms, since
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.bus import BusError
from wire.messages import (
    HISTOGRAM_BOUNDS_MS,
    BoardRow,
    Histogram,
    LoadSnapshot,
    PolicyNews,
    TenantSnapshot,
)

SECOND_US = 1_000_000


def histogram(**counts_by_bound: int) -> Histogram:
    bounds = [f"le_{bound}" for bound in HISTOGRAM_BOUNDS_MS] + ["rest"]
    return Histogram(counts=tuple(counts_by_bound.get(bound, 0) for bound in bounds), sum_us=0)


def a_load(step: int = 1, chat: dict[str, Any] | None = None, **changes: Any) -> LoadSnapshot:
    classes = (
        quiet_class(PriorityClass.INTERACTIVE, **(chat or {})),
        quiet_class(PriorityClass.DEFAULT),
        quiet_class(PriorityClass.BATCH),
    )
    used = {"num_free_blocks": 25, "num_host_blocks": 40, "num_free_host_blocks": 30}
    return quiet_load(**{"model": "smollm2", "step": step, "classes": classes, **used, **changes})


def worker_of(board: LiveBoard, now_us: int) -> dict[str, Any]:
    [worker] = board.frame(now_us)["workers"]
    return worker


def test_a_repeated_snapshot_is_no_news() -> None:
    board = LiveBoard()

    assert board.hear([a_load(step=1)], 0)
    assert not board.hear([a_load(step=1)], 100_000)
    assert board.hear([a_load(step=2)], 200_000)


def test_pools_are_told_as_used_of_total() -> None:
    board = LiveBoard()
    board.hear([a_load()], 0)

    worker = worker_of(board, 0)

    assert worker["device"] == {"total": 100, "used": 75}
    assert worker["host"] == {"total": 40, "used": 10}


def test_a_rate_is_over_the_last_five_seconds() -> None:
    board = LiveBoard()
    for second, tokens in enumerate([0, 1_000, 1_000, 1_010, 1_020, 1_030, 1_040]):
        board.hear([a_load(step=second, output_tokens_total=tokens)], second * SECOND_US)

    assert worker_of(board, 6 * SECOND_US)["output_per_s"] == pytest.approx(8.0)


def test_there_is_no_rate_before_two_readings_lie_a_second_apart() -> None:
    board = LiveBoard()
    board.hear([a_load(step=1, output_tokens_total=0)], 0)
    board.hear([a_load(step=2, output_tokens_total=50)], 250_000)

    assert worker_of(board, 250_000)["output_per_s"] is None
    assert worker_of(board, 250_000)["busy_percent"] is None


def test_busy_is_the_share_of_time_spent_in_steps() -> None:
    board = LiveBoard()
    board.hear([a_load(step=1, busy_us_total=0)], 0)
    board.hear([a_load(step=2, busy_us_total=1_500_000)], 2 * SECOND_US)

    assert worker_of(board, 2 * SECOND_US)["busy_percent"] == 75


def test_ttft_is_told_for_the_last_minute_and_since_the_start() -> None:
    board = LiveBoard()
    slow, both = {"ttft": histogram(le_5000=4)}, {"ttft": histogram(le_50=4, le_5000=4)}
    board.hear([a_load(step=1, chat=slow)], 0)
    board.hear([a_load(step=2, chat=both)], 30 * SECOND_US)

    chat = worker_of(board, 30 * SECOND_US)["classes"][0]

    assert chat["ttft"]["recent_ms"][1] <= 50
    assert chat["ttft_ms"][1] > 2_000


def test_what_happened_over_a_minute_ago_is_not_recent() -> None:
    board = LiveBoard()
    quick = {"ttft": histogram(le_50=4)}
    for second in range(0, 90, 1):
        board.hear([a_load(step=second, chat=quick if second else {})], second * SECOND_US)

    chat = worker_of(board, 89 * SECOND_US)["classes"][0]

    assert chat["ttft"]["recent_ms"] == [None, None, None]
    assert chat["ttft_ms"][0] is not None


def test_until_a_minute_has_been_seen_the_board_says_how_much_of_it_has() -> None:
    board, seen = LiveBoard(), []
    for second in range(0, 70, 7):
        board.hear([a_load(step=second)], second * SECOND_US)
        seen.append(worker_of(board, second * SECOND_US)["recent_ms"])
    assert seen == [0, 7_000, 14_000, 21_000, 28_000, 35_000, 42_000, 49_000, 56_000, 60_000]


def test_preemptions_are_summed_by_lever_and_by_resource() -> None:
    board = LiveBoard()
    levers = (("hold", "slots", 2), ("hold", "memory", 3), ("swap", "memory", 1))
    board.hear([a_load(chat={"preemptions": levers, "shed": (("late", 2),)})], 0)

    chat = worker_of(board, 0)["classes"][0]

    assert chat["preemptions"] == {"hold": 5, "swap": 1}
    assert chat["preempted_by"] == {"slots": 2, "memory": 4}
    assert chat["shed"] == {"late": 2}


def test_quantiles_above_the_target_are_named() -> None:
    board = LiveBoard()
    board.hear([a_load(step=1)], 0)
    late = {"ttft": histogram(le_100=95, le_1000=5), "ttft_target_us": 300_000, "tpot": histogram(le_50=9)}
    board.hear([a_load(step=2, chat=late)], 30 * SECOND_US)

    chat = worker_of(board, 30 * SECOND_US)["classes"][0]

    assert chat["ttft"]["target_ms"] == 300
    assert chat["ttft"]["over"] == ["p99"]
    assert chat["tpot"] == {"recent_ms": [38, 49, 50], "target_ms": None, "over": []}


def test_sheds_are_told_by_rung_and_reason_of_their_class() -> None:
    board = LiveBoard()
    sheds = (("batch", "batch_paused", "class_closed", 7), ("default", "default_refused", "late", 2))
    news = PolicyNews(rung="batch_paused", batch_paused_us=12_000_000, switching_per_mille=61, sheds=sheds)
    board.hear([a_load(policy=news)], 0)

    worker = worker_of(board, 0)

    assert worker["classes"][1]["shed_by_rung"] == {"default_refused: late": 2}
    assert worker["classes"][2]["shed_by_rung"] == {"batch_paused: class_closed": 7}
    assert worker["policy"]["rung"] == "batch_paused"
    assert worker["policy"]["batch_paused_ms"] == 12_000
    assert worker["policy"]["switching_percent"] == 6.1


def test_a_class_is_told_with_its_gap_its_debt_and_its_kept_promises() -> None:
    board = LiveBoard()
    told = {
        "fairness_gap_us": 800_000,
        "fairness_bound_us": 2_500_000,
        "floor_debt_us": 1_500_000,
        "num_promises_kept": 9,
        "num_promises_broken": 1,
    }
    board.hear([a_load(chat=told)], 0)

    chat = worker_of(board, 0)["classes"][0]

    assert (chat["gap_ms"], chat["gap_bound_ms"]) == (800, 2_500)
    assert chat["floor_debt_ms"] == 1_500
    assert chat["promises"] == [9, 1]


def tenant(tenant_id: str, gpu_us: int, weight: int = 1, num_live: int = 1) -> TenantSnapshot:
    return TenantSnapshot(tenant_id=tenant_id, gpu_us=(gpu_us, 0, 0), weight=weight, num_live=num_live)


def test_a_tenants_share_of_the_last_minute_stands_beside_what_it_is_entitled_to() -> None:
    board = LiveBoard()
    board.hear([a_load(step=1, tenants=(tenant("aurora", 9_000_000), tenant("nova", 0)))], 0)
    now = (tenant("aurora", 10_000_000, weight=3), tenant("nova", 3_000_000))
    board.hear([a_load(step=2, tenants=now)], 10 * SECOND_US)

    assert worker_of(board, 10 * SECOND_US)["tenants"] == [
        ["nova", 1, 3_000, 75.0, 25.0, 3_000],
        ["aurora", 1, 1_000, 25.0, 75.0, 10_000],
    ]


def test_only_the_tenants_with_most_are_named_and_the_rest_is_one_row() -> None:
    board = LiveBoard()
    board.hear([a_load(tenants=())], 0)
    named = [tenant(f"t{number:02}", 1_000 * (100 - number)) for number in range(30)]
    many = (*named, tenant("", 5_000_000))
    board.hear([a_load(step=2, tenants=many)], SECOND_US)

    rows = worker_of(board, SECOND_US)["tenants"]

    assert [row[0] for row in rows] == [*(f"t{number:02}" for number in range(10)), ""]
    assert rows[-1][1] == 21
    assert sum(row[2] for row in rows) == pytest.approx(sum(sum(row.gpu_us) for row in many) // 1_000, abs=len(rows))


@pytest.mark.parametrize("name", ["nova", ""], ids=["a tenant", "the rest"])
def test_no_tenant_had_less_than_nothing_of_the_last_minute(name: str) -> None:
    board = LiveBoard()
    board.hear([a_load(step=1, tenants=(tenant("aurora", 9_000_000), tenant(name, 5_001)))], 0)
    board.hear([a_load(step=2, tenants=(tenant("aurora", 9_500_000), tenant(name, 5_000)))], 10 * SECOND_US)

    assert worker_of(board, 10 * SECOND_US)["tenants"][1][2:4] == [0, 0.0]


def test_a_silent_worker_stays_with_its_last_numbers_and_their_age() -> None:
    board = LiveBoard()
    board.hear([a_load(step=9, last_step_age_us=100_000)], 0)
    board.hear([], 7 * SECOND_US)

    worker = worker_of(board, 7 * SECOND_US)

    assert worker["state"] == "silent"
    assert worker["age_ms"] == 7_000
    assert worker["step_age_ms"] == 7_100
    assert worker["step"] == 9


def test_a_worker_that_only_repeats_itself_is_silent_too() -> None:
    board = LiveBoard()
    board.hear([a_load(step=9)], 0)
    board.hear([a_load(step=9)], 3 * SECOND_US)

    assert worker_of(board, 3 * SECOND_US)["state"] == "silent"


def test_a_worker_silent_for_two_minutes_is_forgotten() -> None:
    board = LiveBoard()
    board.hear([a_load()], 0)
    board.hear([], 121 * SECOND_US)

    assert board.frame(121 * SECOND_US)["workers"] == []


def test_a_new_epoch_begins_at_nought_without_negative_rates() -> None:
    board = LiveBoard()
    board.hear([a_load(step=900, output_tokens_total=90_000)], 0)
    board.hear([a_load(step=1, epoch=2, output_tokens_total=0)], 2 * SECOND_US)
    board.hear([a_load(step=9, epoch=2, output_tokens_total=40)], 4 * SECOND_US)

    assert worker_of(board, 4 * SECOND_US)["output_per_s"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("changes", "state"),
    [({}, "ready"), ({"ready": False}, "starting"), ({"draining": True}, "draining")],
)
def test_a_worker_says_whether_it_takes_work(changes: dict[str, Any], state: str) -> None:
    board = LiveBoard()
    board.hear([a_load(**changes)], 0)

    assert worker_of(board, 0)["state"] == state


def test_a_frame_is_plain_data_with_a_row_for_each_request() -> None:
    board = LiveBoard()
    row = BoardRow(
        response_id="r1",
        tenant_id="bulk",
        priority_class=PriorityClass.BATCH,
        state="held",
        num_blocks=3,
        num_computed_tokens=40,
        num_output_tokens=8,
    )
    board.hear([a_load(board=(row,))], 0)

    frame = json.loads(json.dumps(board.frame(0)))

    assert frame["workers"][0]["board"] == [["r1", "bulk", "batch", "held", 3, 40, 8]]


def test_a_quantile_lies_inside_its_bucket() -> None:
    counted = histogram(le_50=50, le_100=50)

    assert quantile_ms(counted, 50) == 50
    assert quantile_ms(counted, 75) == 75
    assert quantile_ms(counted, 95) == 95


@pytest.mark.parametrize(("percent", "value_ms"), [(50, 150), (90, 190), (95, 195), (99, 199), (100, 200)])
def test_the_quantiles_of_a_few_are_not_all_the_edge_of_their_bucket(percent: int, value_ms: int) -> None:
    """Prometheus' ``histogram_quantile``: a part of a count is a part of the bucket."""
    for count in (1, 2, 7):
        assert quantile_ms(histogram(le_200=count), percent) == value_ms


def test_a_quantile_of_nothing_is_nothing() -> None:
    assert quantile_ms(histogram(), 50) is None


def test_a_quantile_above_the_last_bound_is_that_bound() -> None:
    assert quantile_ms(histogram(rest=3), 95) == HISTOGRAM_BOUNDS_MS[-1]


def test_since_is_what_was_counted_in_between() -> None:
    assert since(histogram(le_5=7, rest=2), histogram(le_5=3, rest=2)) == histogram(le_5=4)


class Desk:
    """A Bus and a clock by hand. Always: sleeping moves the clock, so a wait takes no time."""

    def __init__(self) -> None:
        self.now_us = 1_000_000
        self.loads: Sequence[LoadSnapshot] = []
        self.num_reads = 0
        self.is_down = False
        self.feed = LiveFeed(self.read, lambda: self.now_us, self.sleep)

    async def read(self) -> Sequence[LoadSnapshot]:
        self.num_reads += 1
        if self.is_down:
            raise BusError("gone")
        return self.loads

    async def sleep(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)


async def test_all_who_watch_share_one_reading() -> None:
    desk = Desk()

    frames = [await desk.feed.frame_after(0) for _ in range(50)]

    assert desk.num_reads == 1
    assert len(set(frames)) == 1


async def test_news_is_sent_at_the_next_reading() -> None:
    desk = Desk()
    number, _ = await desk.feed.frame_after(0)
    desk.loads = [a_load(step=5)]
    before_us = desk.now_us

    _, text = await desk.feed.frame_after(number)

    assert desk.now_us - before_us == READ_PERIOD_US
    assert json.loads(text)["workers"][0]["step"] == 5


async def test_without_news_a_frame_still_comes_every_second() -> None:
    desk = Desk()
    number, _ = await desk.feed.frame_after(0)
    before_us = desk.now_us

    await desk.feed.frame_after(number)

    assert desk.now_us - before_us == SECOND_US


async def test_a_watcher_that_fell_behind_gets_the_newest_frame_only() -> None:
    desk = Desk()
    slow, _ = await desk.feed.frame_after(0)
    quick = slow
    for step in range(2, 7):
        desk.loads = [a_load(step=step)]
        quick, _ = await desk.feed.frame_after(quick)

    number, text = await desk.feed.frame_after(slow)

    assert number == quick == slow + 5
    assert json.loads(text)["workers"][0]["step"] == 6


async def test_a_bus_that_goes_down_is_said_at_once_and_the_last_numbers_stay() -> None:
    desk = Desk()
    desk.loads = [a_load(step=5)]
    number, _ = await desk.feed.frame_after(0)
    desk.is_down = True

    _, text = await desk.feed.frame_after(number)

    assert json.loads(text)["bus_up"] is False
    assert json.loads(text)["workers"][0]["step"] == 5
