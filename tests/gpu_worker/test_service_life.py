"""A worker's life: it waits for the Bus, drains, starts again under a new epoch, and does not live on half dead."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.serving.sender import LAST_WORDS_US
from gpu_worker.serving.service import ThreadDied
from tests.gpu_worker.service_stage import LIMIT_S, Stage
from wire.bus import BusError
from wire.messages import Drain


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_does_not_live_on_when_one_of_its_threads_has_died(small_worker: Any) -> None:
    stage = Stage(small_worker)
    stage.start()
    stage.bus.broken = ValueError("a fault of our own")
    stage.thread.join(LIMIT_S)
    assert isinstance(stage.error, ThreadDied)
