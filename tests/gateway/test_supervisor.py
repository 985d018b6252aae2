"""Promises of the supervisor: it keeps alive what can be kept, explains what cannot, and leaves nobody behind."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gateway.supervision.output import LineBuffer, Output
from gateway.supervision.process import MAX_SHORT_LIVES, STEADY_S, ProcessSpec, Restarts, status_in_words
from gateway.supervision.supervisor import SupervisionError, Supervisor

SLEEPS = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def _python(name: str, program: str, **fields: object) -> ProcessSpec:
    fields = {"settled_s": 0.0, "environment": dict(os.environ), **fields}
    return ProcessSpec(name=name, command=lambda: [sys.executable, "-c", program], **fields)


class Stage:
    """A supervisor and what it said."""

    def __init__(self) -> None:
        self.screen = io.StringIO()
        self.supervisor = Supervisor(Output(self.screen))

    def tick_until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.screen.getvalue()
            self.supervisor.tick()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.supervisor.stop([["one", "two", "once"]])


def _our_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_output_stands_behind_the_name_of_its_process(stage: Stage) -> None:
    stage.supervisor.start([_python("one", "print('hello', flush=True);" + SLEEPS)])
    stage.tick_until(lambda: "one      | hello\n" in stage.screen.getvalue())


def test_a_process_is_ready_when_its_check_says_so_and_says_it_in_one_line(stage: Stage) -> None:
    answers = iter([False, False, True])
    stage.supervisor.start([_python("one", SLEEPS, is_ready=lambda: next(answers))])
    assert [line for line in stage.screen.getvalue().splitlines() if "ready after" in line] != []
    assert stage.supervisor.memory_mib("one") > 0


def test_a_process_is_not_asked_while_the_life_before_may_answer_for_it(stage: Stage) -> None:
    now_s = itertools.count(0.0, 0.5)  # each look at the clock is half a second later
    stage.supervisor = Supervisor(Output(stage.screen), clock=lambda: next(now_s))
    stage.supervisor.start([_python("one", SLEEPS, is_ready=lambda: True, asked_after_s=9.0)], timeout_s=99)
    (told_s,) = re.findall(r"ready after (.*) s \(", _said(stage))
    assert 9.0 <= float(told_s) < 12.0


def test_a_check_that_breaks_ends_nobody_is_told_once_and_asked_again(stage: Stage) -> None:
    answers = iter([ValueError("no sense"), RuntimeError("nor this"), True])

    def is_ready() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    stage.supervisor.start([_python("one", SLEEPS, is_ready=is_ready)])
    told = [line.split("| ")[1] for line in _said(stage).splitlines()]
    assert told[0] == "cannot be asked yet: ValueError: no sense"
    assert told[1].startswith("ready after")


def test_a_process_that_dies_is_started_again(stage: Stage, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dies_once = (
        f"import pathlib; p = pathlib.Path({str(mark)!r}); first = not p.exists(); p.touch()\nif not first: {SLEEPS}"
    )
    spec = _python("one", dies_once, is_ready=mark.exists)
    stage.supervisor.start([spec])
    stage.tick_until(lambda: stage.screen.getvalue().count("ready after") >= 1 and "starting it again" in _said(stage))
    stage.tick_until(lambda: stage.supervisor.memory_mib("one") > 0)
    assert "ended with status 0; starting it again in 0.5 s" in _said(stage)


def test_a_wrong_command_line_ends_at_once_with_its_last_words(stage: Stage) -> None:
    with pytest.raises(SupervisionError, match=r"one ended with status 2; its last words: no such thing"):
        stage.supervisor.start([_python("one", "print('no such thing'); raise SystemExit(2)", is_ready=lambda: False)])


def test_a_crash_loop_ends_with_one_sentence() -> None:
    supervisor = Supervisor(Output(io.StringIO()), clock=lambda: 20 * time.monotonic())  # the back-off takes 7.5 s
    with pytest.raises(
        SupervisionError, match="one ended with status 1 again and again; its last words: Exception: boom"
    ):
        supervisor.start([_python("one", "raise Exception('boom')", is_ready=lambda: False)], timeout_s=9_000)


def test_a_process_that_never_gets_ready_is_named_with_its_last_words(stage: Stage) -> None:
    stage.supervisor = Supervisor(Output(stage.screen), clock=lambda: 99.0 if "waits" in _said(stage) else 0.0)
    with pytest.raises(SupervisionError, match="one did not become ready within 9 s; its last words: it waits"):
        stage.supervisor.start(
            [_python("one", "print('it waits', flush=True);" + SLEEPS, is_ready=lambda: False)], timeout_s=9
        )


def test_stopping_leaves_neither_children_nor_grandchildren(stage: Stage, tmp_path: Path) -> None:
    grandchild = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}])
print(child.pid, flush=True)
child.wait()
"""
    before = _our_children()
    stage.supervisor.start([_python("one", grandchild), _python("two", DEAF, stop_timeout_s=0.2)])
    stage.tick_until(lambda: _said(stage).count("deaf") == 2)
    numbers = [line.split("| ")[1] for line in _said(stage).splitlines() if line.split("| ")[1].isdigit()]
    stage.supervisor.stop([["one", "two"]])
    stage.tick_until(lambda: not psutil.pid_exists(int(numbers[0])))
    assert _our_children() == before


def test_stages_stop_in_the_order_given(stage: Stage) -> None:
    last_words = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("{0} stops"))
print("{0} set", flush=True)
time.sleep(60)
"""
    stage.supervisor.start([_python("one", last_words.format("one")), _python("two", last_words.format("two"))])
    stage.tick_until(lambda: "one set" in _said(stage) and "two set" in _said(stage))
    stage.supervisor.stop([["two"], ["one"]])
    assert _said(stage).index("two stops") < _said(stage).index("one stops")


def test_a_stop_that_takes_longer_says_at_once_what_it_waits_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.supervision.supervisor._SILENT_S", 0.1)
    stage.supervisor.start([_python("one", DEAF, stop_timeout_s=1.0), _python("two", SLEEPS, stop_timeout_s=5.0)])
    stage.tick_until(lambda: "deaf" in _said(stage))
    stage.supervisor.stop([["one", "two"]])
    (told,) = [line for line in _said(stage).splitlines() if "waiting for" in line]
    assert told.endswith("| waiting for one, 1 s at most; Ctrl-C ends them at once")


def test_a_one_off_command_that_fails_says_why(stage: Stage) -> None:
    with pytest.raises(SupervisionError, match="once failed with status 3; its last words: no table"):
        stage.supervisor.run_once(_python("once", "import sys; print('no table'); sys.exit(3)"))


def test_a_one_off_command_that_works_is_waited_for(stage: Stage, tmp_path: Path) -> None:
    stage.supervisor.run_once(_python("once", f"open({str(tmp_path / 'made')!r}, 'w')"))
    assert (tmp_path / "made").exists()


def test_an_interrupt_ends_the_wait_for_readiness(stage: Stage) -> None:
    def interrupts() -> bool:
        stage.supervisor.interrupt()
        return False

    stage.supervisor.start([_python("one", SLEEPS, is_ready=interrupts)])
    assert stage.supervisor.is_interrupted
    stage.supervisor.run()  # returns at once


def test_one_wish_that_arrives_twice_is_no_impatience(stage: Stage) -> None:
    stage.supervisor.start([_python("one", DEAF, stop_timeout_s=0.5)])
    stage.tick_until(lambda: "deaf" in _said(stage))
    stage.supervisor.interrupt()
    stage.supervisor.interrupt()
    asked_at = time.monotonic()
    stage.supervisor.stop([["one"]])
    assert time.monotonic() - asked_at >= 0.5  # its whole time to end by itself


def test_a_second_wish_after_a_while_does_not_wait(stage: Stage) -> None:
    moments = iter([100.0, 102.0])
    hasty = Supervisor(Output(stage.screen), clock=lambda: next(moments, 200.0))
    hasty.interrupt()
    hasty.interrupt()
    assert hasty.is_impatient


def test_children_of_a_supervisor_that_is_killed_outright_end_too(tmp_path: Path) -> None:
    program = f"""
import os, sys
from gateway.supervision.output import Output
from gateway.supervision.process import ProcessSpec
from gateway.supervision.supervisor import Supervisor
supervisor = Supervisor(Output(sys.stdout))
command = [sys.executable, "-c", "import os; print('child', os.getpid(), flush=True);" + {SLEEPS!r}]
supervisor.start([ProcessSpec(name="one", command=lambda: command, environment=dict(os.environ), settled_s=0)])
supervisor.run()
"""
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    with killed.stdout as lines:
        child = next(int(line.split()[-1]) for line in lines if "child" in line)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    _wait_for_end(child)


def test_back_off_doubles_and_gives_up_after_short_lives() -> None:
    restarts = Restarts()
    delays = [restarts.delay_s(lived_s=1.0, status=1) for _ in range(MAX_SHORT_LIVES)]
    assert delays == [0.5, 1.0, 2.0, 4.0, None]


def test_a_steady_life_forgives_earlier_deaths() -> None:
    restarts = Restarts()
    for _ in range(MAX_SHORT_LIVES - 1):
        restarts.delay_s(lived_s=1.0, status=1)
    assert restarts.delay_s(lived_s=STEADY_S, status=1) == 0.5


def test_a_signal_is_named() -> None:
    assert status_in_words(-9) == "SIGKILL"
    assert status_in_words(1) == "status 1"


def test_lines_that_come_in_pieces_are_put_together() -> None:
    lines = LineBuffer(num_kept=2)
    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\n\nthr") == ["two"]
    assert lines.feed(b"") == ["thr"]
    assert lines.last_lines == ["two", "thr"]


def _said(stage: Stage) -> str:
    return stage.screen.getvalue()


def _wait_for_end(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} still lives"
        time.sleep(0.02)
