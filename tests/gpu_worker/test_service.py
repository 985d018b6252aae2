"""The worker's threads: nothing lost, nothing twice, whatever happens to the Bus, the gateways and the epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_worker.clock import MonotonicClock
from gpu_worker.executor import DeviceLost
from gpu_worker.listener import GATEWAY_CHECK_INTERVAL_US, WATCHDOG_US
from gpu_worker.loop import WorkerLoop
from gpu_worker.sender import LAST_WORDS_US
from gpu_worker.service import GATEWAY_GRACE_US, ThreadDied, WorkerService
from gpu_worker.simulated import DEVICES, SimulatedExecutor
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, gpu_classes
from wire.bus import BadEntry, BusError, StepOutput
from wire.memory_bus import GATEWAY_LIFETIME_US, MemoryGatewayBus, MemoryHub, MemoryWorkerBus
from wire.messages import Cancel, Drain, Finished, Rejected, Tokens, Usage

LIMIT_S = 20.0


class ShiftedClock(MonotonicClock):
    """Real time, and jumps when a test says so."""

    def __init__(self) -> None:
        self.shift_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.shift_us


class Gate:
    """Holds whoever passes while ``gate`` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def pass_gate(self) -> None:
        assert self.gate.wait(LIMIT_S)


class HeldExecutor(SimulatedExecutor, Gate):
    """Waits in the middle of a step while ``gate`` is closed."""

    def __init__(self, clock: Any, scale: float) -> None:
        SimulatedExecutor.__init__(self, DEVICES["toy"], clock, scale=scale)
        Gate.__init__(self)

    def execute(self, plan: StepPlan) -> StepResult:
        self.pass_gate()
        return super().execute(plan)


class FlakyBus(MemoryWorkerBus):
    """Fails as often as told, before or after what it was asked to do."""

    failures_before = failures_after = num_deaf = num_gateway_checks = 0
    failure: BusError = BusError("gone")
    broken: Exception | None = None
    not_understood: tuple[BadEntry, ...] | list[BadEntry] = ()

    def publish(self, output: StepOutput) -> None:
        if self.failures_before:
            self.failures_before -= 1
            raise self.failure
        super().publish(output)
        if self.failures_after:
            self.failures_after -= 1
            raise BusError("the answer was lost")

    def live_gateways(self) -> frozenset[str]:
        self.num_gateway_checks += 1
        return super().live_gateways()

    def receive(self, timeout_s: float) -> Any:
        if self.broken is not None:
            raise self.broken
        if self.num_deaf:
            self.num_deaf -= 1
            raise self.failure
        bad, self.not_understood = self.not_understood, ()
        return [*bad, *super().receive(timeout_s)]


class Stage:
    """A service on its thread and one gateway that listens to it."""

    def __init__(
        self, small_worker: Any, *, max_stream_length: int = 10_000, scale: float = 0.01, executor: Any = None
    ) -> None:
        self.clock = ShiftedClock()
        self.hub = MemoryHub(self.clock.now_us, max_stream_length=max_stream_length)
        self.bus = FlakyBus(self.hub, "w1")
        self.gateway: MemoryGatewayBus = self.hub.gateway("g1")
        self.executor = executor or HeldExecutor(self.clock, scale)
        self.epochs: list[int] = []
        self.heard: list[Any] = []
        self.error: BaseException | None = None
        self.all_sent: bool | None = None
        self.service = WorkerService(
            bus=self.bus,
            make_loop=lambda epoch: self.make_loop(small_worker, epoch),
            clock=self.clock,
            drain_limit_s=LIMIT_S,
            on_ready=self.epochs.append,
        )
        self.thread = threading.Thread(target=self._run)

    def make_loop(self, small_worker: Any, epoch: int) -> WorkerLoop:
        loop: WorkerLoop = small_worker.loop(self.clock, epoch=epoch, executor=self.executor)
        return loop

    def _run(self) -> None:
        try:
            self.all_sent = self.service.run()
        except (ThreadDied, DeviceLost) as error:
            self.error = error

    def start(self) -> None:
        self.beat()
        self.thread.start()
        self.until(lambda: bool(self.epochs))

    def beat(self) -> None:
        self.hub.gateways_seen_at_us["g1"] = self.clock.now_us()

    def send(self, message: Any) -> None:
        self.gateway.send_now("w1", message)

    def until(self, condition: Callable[[], bool]) -> None:
        """Listen until it holds."""
        give_up_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < give_up_s, self.heard
            self.heard.extend(self.gateway.receive_now())
            with self.hub.changed:
                self.hub.changed.wait(0.01)

    def until_end(self, response_id: str) -> Any:
        self.until(lambda: self.end(response_id) is not None)
        return self.end(response_id)

    def until_checked(self, num_checks: int) -> None:
        self.until(lambda: self.bus.num_gateway_checks >= num_checks)

    def until_load_after(self, at_us: int) -> int:
        """Until a newer heartbeat; when it came."""
        self.until(lambda: self.hub.loads["w1"][0] > at_us)
        return self.hub.loads["w1"][0]

    def end(self, response_id: str) -> Finished | Rejected | None:
        for message in self.heard:
            if isinstance(message, Finished | Rejected) and message.response_id == response_id:
                return message
        return None

    def indexes(self, response_id: str) -> list[int]:
        """Index of every token heard of a response, in order of arrival."""
        return [
            first + offset
            for message in self.heard
            if isinstance(message, Tokens)
            for name, first, new in zip(message.response_ids, message.first_indexes, message.token_ids, strict=True)
            if name == response_id
            for offset in range(len(new))
        ]

    def usages(self) -> list[Usage]:
        return [entry.message for entry in self.hub.usage if isinstance(entry.message, Usage)]

    def stop(self) -> None:
        self.executor.gate.set()
        self.service.ask_drain()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def stage(small_worker: Any) -> Iterator[Stage]:
    stage = Stage(small_worker)
    stage.start()
    yield stage
    stage.stop()


def test_a_response_travels_from_inbox_to_outbox_and_into_the_books(stage: Stage, small_worker: Any) -> None:
    stage.send(small_worker.submit(max_tokens=20))
    end = stage.until_end("r1")
    assert isinstance(end, Finished)
    assert stage.indexes("r1") == list(range(20))
    assert [usage.output_tokens for usage in stage.usages()] == [20]


def test_a_step_whose_answer_was_lost_is_neither_lost_nor_seen_twice(stage: Stage, small_worker: Any) -> None:
    stage.bus.failures_after = 3
    stage.send(small_worker.submit(max_tokens=30))
    stage.until_end("r1")
    assert stage.indexes("r1") == list(range(30))
    assert len(stage.usages()) == 1


def test_tokens_made_while_the_bus_was_away_arrive_in_order_when_it_is_back(stage: Stage, small_worker: Any) -> None:
    stage.bus.failures_before = 3
    stage.send(small_worker.submit(max_tokens=30))
    stage.until_end("r1")
    assert stage.indexes("r1") == list(range(30))


def test_draining_finishes_what_runs_refuses_what_comes_and_returns(stage: Stage, small_worker: Any) -> None:
    stage.executor.gate.clear()
    stage.send(small_worker.submit("running", max_tokens=20))
    stage.until(lambda: not stage.hub.inboxes["w1"])
    stage.executor.gate.set()
    stage.until(lambda: bool(stage.indexes("running")))
    stage.service.ask_drain()
    stage.thread.join(LIMIT_S)
    stage.until_end("running")
    assert stage.indexes("running") == list(range(20))
    assert [usage.terminal for usage in stage.usages()] == ["completed"]


def test_a_worker_that_an_operator_drains_finishes_what_runs_and_ends(stage: Stage, small_worker: Any) -> None:
    stage.send(small_worker.submit("running", max_tokens=20))
    stage.until(lambda: bool(stage.indexes("running")))
    stage.send(Drain(worker_epoch=stage.epochs[0], actor="ops"))
    stage.thread.join(LIMIT_S)

    assert not stage.thread.is_alive()
    stage.until_end("running")
    assert stage.indexes("running") == list(range(20))


def test_a_fenced_worker_drops_everything_and_serves_under_a_new_epoch(stage: Stage, small_worker: Any) -> None:
    stage.executor.gate.clear()
    stage.send(small_worker.submit("doomed", max_tokens=1_000))
    stage.until(lambda: not stage.hub.inboxes["w1"])
    with stage.hub.changed:
        stage.hub.fenced.add("w1")
    stage.executor.gate.set()
    stage.until(lambda: len(stage.epochs) == 2)
    heard_before = len(stage.indexes("doomed"))
    stage.send(small_worker.submit("next", max_tokens=5))
    stage.until_end("next")
    assert stage.epochs[1] > stage.epochs[0]
    assert len(stage.indexes("doomed")) == heard_before
    assert [usage.response_id for usage in stage.usages()] == ["next"]


def test_a_gateway_that_is_gone_for_15_seconds_loses_its_responses_and_they_are_settled(small_worker: Any) -> None:
    stage = Stage(small_worker, scale=0.5)
    stage.start()
    stage.send(small_worker.submit(max_tokens=1_900))
    stage.until(lambda: len(stage.indexes("r1")) > 2)
    for jump_us in (GATEWAY_LIFETIME_US, GATEWAY_CHECK_INTERVAL_US):
        num_checks = stage.bus.num_gateway_checks + 1
        stage.clock.shift_us += jump_us
        stage.until_checked(num_checks)
    assert not stage.usages()
    stage.clock.shift_us += GATEWAY_GRACE_US
    stage.until_end("r1")
    stage.stop()
    (usage,) = stage.usages()
    assert usage.terminal == "failed_platform"
    assert 0 < usage.output_tokens < 1_900


def test_a_gateway_that_does_not_read_is_cut_off_and_the_others_go_on(small_worker: Any) -> None:
    stage = Stage(small_worker, max_stream_length=40)
    stage.start()
    stage.send(small_worker.submit("deaf", gateway_id="g2", max_tokens=1_900))
    stage.hub.gateways_seen_at_us["g2"] = stage.clock.now_us() + 10**12
    stage.until(lambda: bool(stage.usages()))
    stage.send(small_worker.submit("other", max_tokens=30))
    stage.until_end("other")
    stage.stop()
    assert stage.indexes("other") == list(range(30))
    assert [usage.terminal for usage in stage.usages()] == ["failed_platform", "completed"]


def test_a_cancel_frees_its_place_while_others_run(stage: Stage, small_worker: Any) -> None:
    stage.send(small_worker.submit("long", max_tokens=1_900))
    stage.until(lambda: len(stage.indexes("long")) > 2)
    stage.send(Cancel(response_id="long", attempt=1, reason="client"))
    stage.until_end("long")
    assert stage.usages()[0].terminal == "cancelled_client"
    assert stage.usages()[0].output_tokens == len(stage.indexes("long"))


def test_the_heartbeat_goes_on_while_a_step_takes_long(stage: Stage, small_worker: Any) -> None:
    stage.executor.gate.clear()
    stage.send(small_worker.submit(max_tokens=5))
    stage.until(lambda: not stage.hub.inboxes["w1"])
    published_at_us = stage.hub.loads["w1"][0]
    stage.until(lambda: stage.hub.loads["w1"][0] > published_at_us)
    assert stage.hub.loads["w1"][1].ready


def test_a_step_of_30_seconds_has_its_books_and_plans_dumped_once(
    stage: Stage, small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.executor.gate.clear()
    stage.send(small_worker.submit(max_tokens=5))
    stage.until(lambda: not stage.hub.inboxes["w1"])
    loads_before = stage.hub.loads["w1"][0]
    stage.clock.shift_us += WATCHDOG_US
    for _ in range(3):
        loads_before = stage.until_load_after(loads_before)
    dumped = capsys.readouterr().err
    assert dumped.count("a step has been running for 30 s") == 1
    assert "r1/0@0+5" in dumped
    assert "in pass_gate\n    assert self.gate.wait(LIMIT_S)" in dumped  # where it hangs
    assert not stage.hub.loads["w1"][1].ready
    stage.executor.gate.set()
    stage.until_end("r1")
    stage.until(lambda: stage.hub.loads["w1"][1].ready)


def test_a_dump_on_request_comes_at_a_step_boundary(
    stage: Stage, small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.service.ask_dump()
    stage.send(small_worker.submit(max_tokens=3))
    stage.until_end("r1")
    assert "books: balanced" in capsys.readouterr().err


def test_a_message_that_is_not_understood_is_skipped_and_the_next_one_is_served(
    stage: Stage, small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.bus.not_understood = [
        BadEntry("7-0", "version 9, this process speaks 1"),
        BadEntry("8-0", "unknown kind 'X'"),
    ]
    stage.until(lambda: not stage.bus.not_understood)
    stage.send(small_worker.submit(max_tokens=3))
    assert stage.until_end("r1").output_tokens == 3
    said = capsys.readouterr().err
    assert "skipped entry 7-0: version 9, this process speaks 1" in said
    assert "skipped entry 8-0: unknown kind 'X'" in said


def test_a_policy_that_arrives_over_the_bus_is_taken(stage: Stage) -> None:
    stage.hub.set_policy(PolicySnapshot(version=77, classes=gpu_classes()))
    stage.until(lambda: stage.hub.loads["w1"][1].policy_version == 77)
    assert stage.hub.loads["w1"][1].policy_version == 77


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_does_not_live_on_when_one_of_its_threads_has_died(small_worker: Any) -> None:
    stage = Stage(small_worker)
    stage.start()
    stage.bus.broken = ValueError("a fault of our own")
    stage.thread.join(LIMIT_S)
    assert isinstance(stage.error, ThreadDied)


def test_a_worker_waits_for_a_bus_that_is_not_there_yet(small_worker: Any) -> None:
    stage = Stage(small_worker)
    opens = [0]
    really_open = stage.bus.open

    def open_late() -> int:
        opens[0] += 1
        if opens[0] < 3:
            raise BusError("not there yet")
        return really_open()

    stage.bus.open = open_late  # type: ignore[method-assign]
    stage.start()
    stage.send(small_worker.submit(max_tokens=2))
    stage.until_end("r1")
    stage.stop()
    assert opens[0] == 3


def test_a_worker_told_to_end_while_the_bus_is_away_tries_for_a_while_and_says_so(
    small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(small_worker)
    stage.start()
    stage.bus.failures_before = 10**9
    stage.send(small_worker.submit(max_tokens=2))
    stage.until(lambda: stage.bus.failures_before < 10**9)
    stage.service.ask_drain()
    while stage.thread.is_alive():
        stage.clock.shift_us += LAST_WORDS_US
        stage.thread.join(0.1)
    assert stage.all_sent is False
    assert "the last outputs were not sent" in capsys.readouterr().err


def test_a_worker_that_has_said_everything_says_so(small_worker: Any) -> None:
    stage = Stage(small_worker)
    stage.start()
    stage.send(small_worker.submit(max_tokens=2))
    stage.until_end("r1")
    stage.stop()
    assert stage.all_sent is True
