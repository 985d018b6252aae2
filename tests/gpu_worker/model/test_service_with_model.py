"""The worker's threads over the real model: Bus cut, restarted, full; newer messages; a hanging step; fences, drains.

Whatever happens around it, a text is the one that its request gets alone, said once and counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.executor import DeviceLost
from gpu_worker.loop import WorkerLoop
from gpu_worker.serving.listener import WATCHDOG_US
from gpu_worker.simulated import BYTE_TOKENS, engine_config
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, cpu_classes
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.model.worker import COST
from tests.gpu_worker.service_stage import LIMIT_S, Gate, Stage
from wire.bus import BadEntry, BusFull
from wire.messages import Finished, Rejected, SamplingParameters, Tokens

GREEDY = SamplingParameters(temperature=0.0)
PROMPT = tuple((7 * index + 3) % 259 for index in range(37))
NUM_TOKENS = 40


class GatedModel(Gate):
    """The model executor; waits in the middle of a step while ``gate`` is closed."""

    def __init__(self, executor: ModelExecutor) -> None:
        super().__init__()
        self.is_lost = False
        self.shape = executor.shape
        self.executor = executor

    def execute(self, plan: StepPlan) -> StepResult:
        self.pass_gate()
        if self.is_lost:
            raise DeviceLost("the device is lost: it fell off the bus")
        return self.executor.execute(plan)

    def forget(self, request_id: Any) -> None:
        self.executor.forget(request_id)

    def close(self) -> None:
        self.executor.close()


class ModelStage(Stage):
    """A service over the real model on its thread, and one gateway that listens to it."""

    def __init__(self, small_worker: Any, executor: ModelExecutor) -> None:
        super().__init__(small_worker, executor=GatedModel(executor))
        self._small_worker = small_worker

    def make_loop(self, small_worker: Any, epoch: int) -> WorkerLoop:
        shape = self.executor.shape
        policy = PolicySnapshot(version=1, classes=cpu_classes())
        return WorkerLoop(
            identity=WorkerIdentity(worker_id="w1", epoch=epoch, model="tiny", max_model_len=shape.max_model_len),
            scheduler=Scheduler(engine_config(shape, num_slots=4), policy, COST),
            executor=self.executor,
            clock=self.clock,
            token_bytes=BYTE_TOKENS,
            telemetry=Telemetry(),
        )

    def ask(self, name: str, **fields: Any) -> None:
        given = {"prompt_token_ids": PROMPT, "max_tokens": NUM_TOKENS, "sampling": GREEDY, "model": "tiny", **fields}
        self.send(self._small_worker.submit(name, **given))

    def said(self, name: str) -> list[int]:
        """Each token at the index it claims, none twice."""
        token_ids: list[int] = []
        for message in (message for message in self.heard if isinstance(message, Tokens)):
            for response_id, first, new in zip(
                message.response_ids, message.first_indexes, message.token_ids, strict=True
            ):
                if response_id == name:
                    assert first == len(token_ids) + self.num_delivered
                    token_ids += new
        return token_ids

    num_delivered = 0  # to an earlier attempt


@pytest.fixture(scope="module")
def executor(tiny_folder: Path) -> Iterator[ModelExecutor]:
    executor = build(tiny_folder, kv_mib=1, host_kv_mib=1, threads=0)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: ModelExecutor, drive: Any) -> list[int]:
    driver = drive(executor)
    tokens: list[int] = driver.run(driver.add("alone", PROMPT), NUM_TOKENS)
    executor.forget(RequestId("alone"))
    return tokens


@pytest.fixture
def stage(small_worker: Any, executor: ModelExecutor) -> Iterator[ModelStage]:
    stage = ModelStage(small_worker, executor)
    stage.start()
    yield stage
    stage.stop()


def must_have_said_it_once(stage: ModelStage, expected: list[int], name: str = "r1") -> None:
    assert isinstance(stage.until_end(name), Finished)
    assert stage.said(name) == expected
    assert [usage.output_tokens for usage in stage.usages()] == [NUM_TOKENS]


@pytest.mark.parametrize("failures", ["failures_before", "failures_after"])
def test_a_connection_that_is_cut_before_or_after_a_step_was_said_costs_no_token(
    stage: ModelStage, expected: list[int], failures: str
) -> None:
    setattr(stage.bus, failures, 3)
    stage.ask("r1")
    must_have_said_it_once(stage, expected)


def test_a_bus_that_is_full_for_a_while_holds_the_text_up_and_loses_nothing(
    stage: ModelStage, expected: list[int]
) -> None:
    stage.bus.failure = BusFull("out of memory", None)
    stage.bus.failures_before = 4
    stage.ask("r1")
    must_have_said_it_once(stage, expected)


def test_a_bus_that_neither_hears_nor_speaks_for_a_while_is_waited_for(stage: ModelStage, expected: list[int]) -> None:
    """As when Redis restarts: both threads lose it in the middle of an answer."""
    stage.ask("r1")
    stage.until(lambda: bool(stage.indexes("r1")))
    stage.bus.failures_before = stage.bus.num_deaf = 3
    must_have_said_it_once(stage, expected)
    stage.until(lambda: not stage.bus.num_deaf)


def test_messages_of_a_newer_version_and_of_an_unknown_kind_are_stepped_over(
    stage: ModelStage, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    stage.bus.not_understood = [
        BadEntry("7-0", "version 9, this process speaks 1"),
        BadEntry("8-0", "unknown kind 'X'"),
    ]
    stage.ask("r1")
    must_have_said_it_once(stage, expected)
    assert capsys.readouterr().err.count("skipped entry") == 2


def test_a_drain_finishes_the_text_refuses_what_comes_and_says_so_in_its_heartbeat(
    stage: ModelStage, expected: list[int]
) -> None:
    stage.ask("r1")
    stage.until(lambda: bool(stage.indexes("r1")))
    stage.executor.gate.clear()
    stage.service.ask_drain()
    stage.ask("late")
    stage.until(lambda: not stage.hub.inboxes["w1"])
    stage.executor.gate.set()
    stage.thread.join(LIMIT_S)
    assert isinstance(stage.until_end("r1"), Finished)
    end = stage.end("late")
    assert end is None or (isinstance(end, Rejected) and end.reason == "draining")
    assert stage.said("r1") == expected
    assert stage.all_sent is True


def test_a_step_that_hangs_is_reported_once_and_the_worker_is_not_ready_until_it_goes_on(
    stage: ModelStage, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Watchdog, readiness and liveness: it is alive, for its heart beats, and takes nobody in."""
    stage.executor.gate.clear()
    stage.ask("r1")
    stage.until(lambda: not stage.hub.inboxes["w1"])
    beat_at_us = stage.hub.loads["w1"][0]
    stage.until_load_after(beat_at_us)
    assert stage.hub.loads["w1"][1].ready
    stage.clock.shift_us += WATCHDOG_US
    for _ in range(3):
        beat_at_us = stage.until_load_after(beat_at_us)
    dumped = capsys.readouterr().err
    assert dumped.count("a step has been running for 30 s") == 1
    assert "r1/0@0+37" in dumped
    assert not stage.hub.loads["w1"][1].ready
    stage.executor.gate.set()
    must_have_said_it_once(stage, expected)
    stage.until(lambda: stage.hub.loads["w1"][1].ready)


def test_what_a_fenced_epoch_had_said_is_gone_on_with_in_the_next_one(stage: ModelStage, expected: list[int]) -> None:
    """As after a worker was killed: the tokens that had arrived are history, and the rest follows them."""
    stage.ask("r1")
    stage.until(lambda: len(stage.indexes("r1")) >= 5)
    stage.executor.gate.clear()
    with stage.hub.changed:
        stage.hub.fenced.add("w1")
    stage.executor.gate.set()
    stage.until(lambda: len(stage.epochs) == 2)
    delivered = stage.said("r1")
    assert delivered == expected[: len(delivered)]
    assert len(delivered) < NUM_TOKENS
    assert not stage.executor.executor._stream_of
    stage.heard.clear()
    stage.num_delivered = len(delivered)
    stage.ask("r1", attempt=2, delivered_token_ids=(tuple(delivered),))
    assert isinstance(stage.until_end("r1"), Finished)
    assert delivered + stage.said("r1") == expected
    assert [(usage.attempt, usage.output_tokens) for usage in stage.usages()] == [(2, NUM_TOKENS)]


def test_a_device_that_is_lost_ends_the_worker_and_nobodys_answer(stage: ModelStage) -> None:
    """Whoever owns an answer sees the worker die and sends it on; nothing is charged, nothing is called an end."""
    stage.ask("r1")
    stage.until(lambda: len(stage.indexes("r1")) >= 3)
    stage.executor.is_lost = True
    stage.thread.join(LIMIT_S)
    stage.heard.extend(stage.gateway.receive_now())
    assert isinstance(stage.error, DeviceLost)
    assert stage.end("r1") is None
    assert stage.usages() == []
