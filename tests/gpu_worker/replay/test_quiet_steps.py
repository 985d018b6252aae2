"""Quiet steps are the engine's own steps: a log that is told with them ends in the same state as one told without. And
runs side by side are those that one after the other would have been.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from gpu_worker.replay import rerun
from gpu_worker.replay.log_writer import LogWriter
from gpu_worker.replay.record_log import LogError, LogFile, Stepped, log_files
from gpu_worker.replay.recording import RecordingScheduler
from gpu_worker.replay.rerun import Diverged, Listener, replay
from gpu_worker.replay.side_by_side import Run, RunLost, Show, side_by_side
from gpu_worker.replay.what_if import what_if
from scheduler_engine.config import EngineConfig
from scheduler_engine.errors import Misuse
from scheduler_engine.plan import DecodeColumns, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.quiet import QuietSteps
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.replay.random_run import CONFIG, COST, POLICY, RandomRun
from tests.gpu_worker.replay.test_replay import ORIGIN, Wall, rewrite
from tests.gpu_worker.replay.test_replay import recorded as recorded_files

NUM_STEPS = 600


class Loud(QuietSteps):
    """Never finds a quiet step."""

    def begin(self) -> DecodeColumns | None:
        return None


class Stretches(Listener):
    def __init__(self) -> None:
        self.num_quiet = 0

    def decoded(self, decodes: DecodeColumns, entries: Sequence[Stepped]) -> None:
        self.num_quiet += len(entries)


def recorded(folder: Path, seed: int, config: EngineConfig, arrivals_percent: float) -> None:
    writer = LogWriter(folder, 1 << 24, lambda: 1_000_000.0)
    engine = RecordingScheduler(
        config, POLICY, COST, origin=ORIGIN, writer=writer, most_file_bytes=1 << 22, unix_s=lambda: 1_000_000.0
    )
    RandomRun(engine, seed, arrivals_percent=arrivals_percent, with_stops=False).run(NUM_STEPS)
    engine.close()
    writer.close()


def difference(one: Any, other: Any) -> str | None:
    """The first place in which two objects differ, however deep, as a path; None where they are alike."""
    seen: set[tuple[int, int]] = set()
    left = [("engine", one, other)]
    while left:
        path, one, other = left.pop()
        if (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        parts, its_parts = _parts(one), _parts(other)
        is_equal = parts is not None or one == other
        if type(one) is not type(other) or len(parts or ()) != len(its_parts or ()) or not is_equal:
            return f"{path}: {one!r} and {other!r}"
        for (name, part), (_, its_part) in zip(parts or (), its_parts or (), strict=True):
            left.append((f"{path}{name}", part, its_part))
    return None


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What it is made of, in order, each with its place; None for what is a value of its own."""
    if isinstance(value, dict):
        return [
            pair for i, (key, each) in enumerate(value.items()) for pair in ((f".keys[{i}]", key), (f"[{i}]", each))
        ]
    if isinstance(value, list | tuple | deque):
        return [(f"[{i}]", each) for i, each in enumerate(value)]
    if isinstance(value, int | str | bytes | range | set | frozenset | array | bytearray) or value is None:
        return None
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [
        (f".{name}", getattr(value, name, None)) for name in dict.fromkeys([*slots, *getattr(value, "__dict__", ())])
    ]


CONFIGS = (CONFIG, replace(CONFIG, copies_in_order=True), replace(CONFIG, num_host_blocks=0, num_blocks=256))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), config=st.sampled_from(CONFIGS), arrivals_percent=st.sampled_from((0.5, 2, 6)))
def test_quiet_steps_leave_the_engine_as_its_verbs_do(
    tmp_path_factory: pytest.TempPathFactory, seed: int, config: EngineConfig, arrivals_percent: float
) -> None:
    folder = tmp_path_factory.mktemp("quiet")
    recorded(folder, seed, config, arrivals_percent)
    stretches = Stretches()
    quietly = replay(log_files(folder), stretches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rerun, "QuietSteps", Loud)
        one_by_one = replay(log_files(folder))
    for found in (quietly, one_by_one):
        found.engine.check_books()  # whoever looks in makes what is made when asked for
    assert quietly.digest == one_by_one.digest
    assert difference(quietly.engine, one_by_one.engine) is None
    event("has quiet steps" if stretches.num_quiet else "has none")


def test_most_steps_of_a_calm_run_are_quiet(tmp_path: Path) -> None:
    recorded(tmp_path, 1, CONFIG, 2)
    stretches = Stretches()
    replay(log_files(tmp_path), stretches)
    assert stretches.num_quiet > NUM_STEPS // 3


def test_a_recording_engine_takes_no_step_that_passes_its_verbs_by(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, 1 << 24)
    engine = RecordingScheduler(CONFIG, POLICY, COST, origin=ORIGIN, writer=writer, most_file_bytes=1 << 22)
    with pytest.raises(Misuse, match="RecordingScheduler"):
        QuietSteps(engine)
    writer.close()


def test_a_policy_an_arrival_and_a_timer_end_a_quiet_stretch() -> None:
    engine = Scheduler(CONFIG, POLICY, COST)
    quiet = QuietSteps(engine)
    assert quiet.begin() is None, "nobody is here"
    engine.submit(_request("one", max_tokens=100), 0)
    now_us = _verbs(engine, 0)
    decodes = quiet.begin()
    assert decodes is not None
    assert list(decodes.request_ids) == ["one"]
    assert quiet.plan(now_us)
    quiet.apply(7_000, now_us + 7_000)
    now_us += 7_000
    engine.set_policy(replace(POLICY, version=2))
    assert not quiet.plan(now_us)
    now_us = _verbs(engine, now_us)
    engine.submit(_request("two", max_tokens=4, max_queue_wait_us=1_000_000), now_us)
    assert quiet.begin() is not None
    assert not quiet.plan(now_us)
    now_us = _verbs(engine, now_us)
    assert quiet.begin() is not None
    num_quiet = 0
    while quiet.plan(now_us):
        now_us += 7_000
        quiet.apply(7_000, now_us)
        num_quiet += 1
    assert num_quiet < 4, "the second one comes to its limit"


def _request(name: str, **fields: Any) -> Request:
    known: dict[str, Any] = {
        "tenant_id": "Aurora",
        "priority_class": PriorityClass.INTERACTIVE,
        "prompt_token_ids": range(20),
    }
    return Request(request_id=RequestId(name), **known, **fields)


def _verbs(engine: Scheduler, now_us: int) -> int:
    plan = engine.plan_step(now_us)
    engine.apply_step(StepResult(plan.step, 7_000, [0] * plan.num_rows), now_us + 7_000)
    return now_us + 7_000


def test_runs_side_by_side_return_what_they_do_one_after_the_other() -> None:
    runs = [functools.partial(_squared, number) for number in range(5)]
    seen: list[tuple[int, float]] = []
    for most in (1, 2):
        assert side_by_side(iter(runs), most, lambda number, done: seen.append((number, done))) == [0, 1, 4, 9, 16]
    assert seen.count((3, 0.5)) == 2


def test_what_a_run_raises_is_raised_and_ends_the_others() -> None:
    runs: list[Run] = [_endless, functools.partial(_squared, -1)]
    with pytest.raises(ValueError, match="negative"):
        side_by_side(iter(runs), 2, lambda number, done: None)
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(RunLost, match="memory"):
        side_by_side(iter([_killed, _killed]), 2, lambda number, done: None)


def test_runs_end_soon_after_who_asked_for_them(project_root: Path) -> None:
    """It cannot tell them: it is killed."""
    program = (
        "from gpu_worker.replay.side_by_side import side_by_side\n"
        "import os, time\n"
        "def run(show):\n"
        "    os.write(1, b'.')\n"
        "    while True:\n"
        "        show(0.5)\n"
        "        time.sleep(0.01)\n"
        "side_by_side(iter([run, run]), 2, lambda number, done: None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=project_root, stdout=subprocess.PIPE) as asked:
        assert asked.stdout is not None
        both = asked.stdout.read(2)
        asked.kill()
        assert (both, asked.stdout.read()) == (b"..", b""), (
            "the pipe ends when the last who could write to it has ended"
        )


def _squared(number: int, show: Show) -> int:
    show(0.5)
    if number < 0:
        raise ValueError("negative")
    return number * number


def _endless(show: Show) -> None:
    while True:
        show(0.1)


def _killed(show: Show) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> list[LogFile]:
    """Five files, with copies, failures and an edit of the policy in the third."""
    folder = tmp_path_factory.mktemp("long")
    recorded_files(folder, 8, 2_000, wall=Wall())
    return log_files(folder)


def test_a_what_if_is_the_same_in_one_process_and_in_two(long_log: list[LogFile]) -> None:
    assert len(long_log) > 3
    other = replace(POLICY, version=3)
    alone, beside = (what_if([long_log], other, draws=2, processes=number) for number in (1, 2))
    assert beside == alone


def test_what_the_other_process_finds_wrong_is_told(long_log: list[LogFile]) -> None:
    """The second half is told in a process of its own: what it raises comes over."""
    for left_out in range(1, len(long_log) - 1):
        files = [file for number, file in enumerate(long_log) if number != left_out]
        with pytest.raises(LogError, match=r"hold \d+ steps, and count"):
            what_if([files], None, draws=1, processes=2)
    last = long_log[-1]
    entries = [entry for _, some in last.frames() for entry in some]
    (at, step) = next((at, each) for at, each in enumerate(entries) if isinstance(each, Stepped) and each.records)
    entries[at] = msgspec.structs.replace(step, records=b"")
    spoiled = rewrite(last.path.with_name("spoiled.rlog"), entries)
    with pytest.raises(Diverged, match="a decision is another"):
        what_if([[*long_log[:-1], LogFile(spoiled)]], None, draws=1, processes=2)
