"""What the real worker may be told: twice, late, in another order, too late to be of use, too big to fit."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.clock import MonotonicClock
from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import Attach, Cancel, Finished, Rejected, SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
PROMPT = [(7 * index + 3) % 259 for index in range(37)]
HOUR_US = 3_600_000_000


class SteppedClock(MonotonicClock):
    """Real time, and steps when a test says so."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> Iterator[ModelExecutor]:
    executor = build(tiny_folder, kv_mib=1, host_kv_mib=1, threads=0)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: ModelExecutor) -> list[int]:
    worker = ModelWorker(executor)
    worker.submit("alone", PROMPT, sampling=GREEDY)
    worker.run()
    return worker.tokens["alone", 0]


@pytest.fixture
def worker(executor: ModelExecutor) -> ModelWorker:
    return ModelWorker(executor)


def must_be_rejected(worker: ModelWorker, name: str, reason: str) -> Rejected:
    """And free of charge."""
    end, usage = worker.ends[name], worker.usages[name]
    assert isinstance(end, Rejected)
    assert end.reason == reason
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("shed", 0, 0)
    assert (name, 0) not in worker.tokens
    return end


_TOLD = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.integers(1, 2)),
        st.tuples(st.just("attach"), st.integers(0, 5), st.integers(1, 2), st.integers(0, 9)),
        st.tuples(st.just("turn"), st.integers(1, 4)),
    ),
    max_size=24,
)


@settings(max_examples=12, deadline=None)
@given(told=_TOLD)
def test_messages_that_come_twice_late_or_in_any_order_give_each_submit_one_end_and_its_own_text(
    executor: ModelExecutor, expected: list[int], told: list[tuple[Any, ...]]
) -> None:
    """Section 7: duplicate, late and reordered messages, and some about responses that nobody knows."""
    worker = ModelWorker(executor, num_slots=3)
    worker.may_repeat = True
    asked = set()
    for message in told:
        match message:
            case ("submit", number):
                worker.submit(f"r{number}", PROMPT, sampling=GREEDY)
                asked.add(f"r{number}")
            case ("cancel", number, attempt):
                worker.take_in(Cancel(response_id=f"r{number}", attempt=attempt, reason="client"))
            case ("attach", number, attempt, index):
                worker.take_in(Attach(response_id=f"r{number}", attempt=attempt, gateway_id="g2", from_index=index))
            case ("turn", count):
                for _ in range(count):
                    worker.turn()
    worker.run()
    assert worker.num_ends == len(asked)
    assert set(worker.ends) == set(worker.usages) == asked
    for name in asked:
        said = worker.tokens.get((name, 0), [])
        assert said == expected[: len(said)]
        end = worker.ends[name]
        assert isinstance(end, Finished)
        assert len(said) == worker.usages[name].output_tokens == (8 if end.choices[0].reason == "length" else len(said))
    snapshot = worker.loop.snapshot()
    assert snapshot.num_free_blocks == snapshot.num_blocks


def test_a_cancel_that_comes_before_its_submit_stops_nothing_and_one_after_the_end_changes_nothing(
    worker: ModelWorker, expected: list[int]
) -> None:
    worker.take_in(Cancel(response_id="early", attempt=1, reason="client"))
    worker.submit("early", PROMPT, sampling=GREEDY)
    worker.run()
    worker.take_in(Cancel(response_id="early", attempt=1, reason="client"))
    worker.turn()
    assert worker.tokens["early", 0] == expected
    assert worker.usages["early"].terminal == "completed"
    assert worker.num_ends == 1


@pytest.mark.parametrize(
    ("promise", "us", "reason"),
    [
        ("remaining_hard_deadline_us", 0, "late"),
        ("remaining_hard_deadline_us", -5_000_000, "late"),
        ("remaining_completion_us", 0, "late"),
        ("remaining_completion_us", -5_000_000, "late"),
        ("max_queue_wait_us", -5_000_000, "queue_wait"),
    ],
)
def test_a_request_whose_deadline_is_past_is_refused_free_of_charge_and_the_others_go_on(
    worker: ModelWorker, expected: list[int], promise: str, us: int, reason: str
) -> None:
    worker.submit("running", PROMPT, sampling=GREEDY)
    worker.turn()
    worker.submit("past", PROMPT, sampling=GREEDY, **{promise: us})
    worker.submit("beside", PROMPT, sampling=GREEDY)
    worker.run()
    must_be_rejected(worker, "past", reason)
    assert worker.tokens["running", 0] == worker.tokens["beside", 0] == expected


def test_a_target_that_is_past_orders_and_refuses_nobody(worker: ModelWorker, expected: list[int]) -> None:
    worker.submit("soft", PROMPT, sampling=GREEDY, remaining_first_token_us=-1)
    worker.run()
    assert worker.tokens["soft", 0] == expected


def test_a_request_that_has_started_elsewhere_is_served_though_its_deadline_is_past(
    worker: ModelWorker, expected: list[int]
) -> None:
    delivered = (tuple(expected[:3]),)
    worker.tokens["moved", 0] = expected[:3]
    late = {"remaining_hard_deadline_us": -1, "remaining_completion_us": -1, "max_queue_wait_us": 0}
    worker.submit("moved", PROMPT, sampling=GREEDY, attempt=2, delivered_token_ids=delivered, **late)
    worker.run()
    assert worker.tokens["moved", 0] == expected
    assert worker.usages["moved"].output_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "rank", "reason"),
    [
        (512, 1, PriorityClass.INTERACTIVE, "context_length"),
        (100, 300, PriorityClass.INTERACTIVE, "never_fits"),
        (300, 10, PriorityClass.BATCH, "never_fits"),
        (0, 5, PriorityClass.INTERACTIVE, "context_length"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once_and_pushes_nobody_out(
    executor: ModelExecutor, expected: list[int], prompt: int, max_tokens: int, rank: PriorityClass, reason: str
) -> None:
    """S50, S32: a pool of 20 blocks, of which batch may have 18."""
    worker = ModelWorker(executor, num_blocks=20)
    worker.submit("running", PROMPT, sampling=GREEDY, priority_class=PriorityClass.BATCH)
    for _ in range(2):
        worker.turn()
    worker.submit("huge", [1] * prompt, sampling=GREEDY, max_tokens=max_tokens, priority_class=rank)
    worker.turn()
    assert must_be_rejected(worker, "huge", reason).retry_after_us is None
    worker.run()
    assert worker.tokens["running", 0] == expected
    assert worker.usages["running"].counters.num_swaps == worker.usages["running"].counters.num_recomputes == 0


def test_a_clock_that_steps_by_an_hour_costs_a_running_request_nothing_and_a_waiting_one_its_deadline(
    executor: ModelExecutor, expected: list[int]
) -> None:
    """As after a pause of the whole process; the clock of the day is never asked."""
    clock = SteppedClock()
    worker = ModelWorker(executor, num_slots=1, clock=clock)
    worker.submit("running", PROMPT, sampling=GREEDY, remaining_hard_deadline_us=60_000_000)
    while not worker.tokens.get(("running", 0)):
        worker.turn()
    worker.submit("patient", PROMPT, sampling=GREEDY, priority_class=PriorityClass.BATCH)
    worker.submit("urgent", PROMPT, sampling=GREEDY, remaining_hard_deadline_us=60_000_000)
    worker.turn()
    clock.ahead_us += HOUR_US
    worker.run()
    assert worker.tokens["running", 0] == worker.tokens["patient", 0] == expected
    must_be_rejected(worker, "urgent", "late")
    assert worker.usages["patient"].counters.queue_us >= HOUR_US
    assert worker.usages["running"].counters.gpu_us < HOUR_US


def test_nothing_in_the_worker_asks_for_the_time_of_the_day(project_root: Path) -> None:
    """But for the dates of its logs; what it decides hangs on a clock that cannot be set."""
    dates = ("gpu_worker/serving/outage.py", "gpu_worker/replay/log_writer.py", "gpu_worker/replay/recording.py")
    asked = [
        f"{path.relative_to(project_root)}:{node.lineno}"
        for folder in ("gpu_worker", "scheduler_engine")
        for path in sorted((project_root / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("time", "now", "utcnow", "today", "time_ns")
        if isinstance(node.value, ast.Name) and node.value.id in ("time", "datetime", "date")
    ]
    assert [place for place in asked if not place.startswith(dates)] == []
