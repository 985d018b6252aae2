"""What a worker says while it works: heartbeats through a long step, and its books when one hangs or somebody asks."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.serving.listener import WATCHDOG_US
from tests.gpu_worker.service_stage import Stage


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


def test_the_books_of_an_idle_worker_that_has_worked_are_checked_and_not_after_every_answer(
    stage: Stage, small_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer at a time makes a worker idle each time, and the check would hold up the sender of each."""
    an_hour_us = 3_600_000_000
    checks: list[Any] = []
    monkeypatch.setattr("gpu_worker.serving.service.BOOKS_INTERVAL_US", an_hour_us)
    monkeypatch.setattr("gpu_worker.loop.WorkerLoop.check_books", lambda loop: checks.append(loop))
    for number in range(3):
        stage.send(small_worker.submit(f"r{number}", max_tokens=2))
        stage.until_end(f"r{number}")
        stage.until(lambda: len(checks) > 0)
    stage.until_load_after(stage.until_load_after(stage.clock.now_us()))
    assert len(checks) == 1
    stage.clock.shift_us += an_hour_us
    stage.beat()
    stage.until(lambda: len(checks) == 2)


def test_answers_one_at_a_time_do_not_make_the_worker_look_at_itself_after_each(
    stage: Stage, small_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes it idle; a look, and telling it, would hold up the sender of each."""
    an_hour_us = 3_600_000_000
    monkeypatch.setattr("gpu_worker.serving.service.LOAD_INTERVAL_US", an_hour_us)
    for number in range(3):
        stage.send(small_worker.submit(f"r{number}", max_tokens=2))
        stage.until_end(f"r{number}")
    stage.until_load_after(stage.until_load_after(stage.clock.now_us()))
    assert stage.hub.loads["w1"][1].output_tokens_total == 0
    stage.clock.shift_us += an_hour_us
    stage.beat()
    stage.until(lambda: stage.hub.loads["w1"][1].output_tokens_total == 6)


def test_what_the_last_steps_before_idleness_did_is_told_with_nothing_more_to_do(
    stage: Stage, small_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.serving.listener.GATEWAY_CHECK_INTERVAL_US", 3_600_000_000)  # nothing else wakes it
    for number in range(3):
        stage.send(small_worker.submit(f"r{number}", max_tokens=2))
        stage.until_end(f"r{number}")
    stage.until(lambda: stage.hub.loads["w1"][1].output_tokens_total == 6)


def test_a_dump_on_request_comes_at_a_step_boundary(
    stage: Stage, small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.service.ask_dump()
    stage.send(small_worker.submit(max_tokens=3))
    stage.until_end("r1")
    assert "books: balanced" in capsys.readouterr().err
