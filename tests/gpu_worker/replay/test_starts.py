"""Recordings of a worker that was started anew: which of its files belong to the last minutes, and what they tell."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.replay.command import main
from gpu_worker.replay.log_writer import LogWriter
from gpu_worker.replay.record_log import Boot, Entry, LogError, LogFile, Stepped, Submitted, log_files, log_starts
from gpu_worker.replay.recording import Origin, RecordingScheduler
from gpu_worker.replay.rerun import Diverged, entries_of
from gpu_worker.replay.what_if import comparison, what_if
from scheduler_engine.policy import snapshot_to_dict
from tests.gpu_worker.replay.random_run import CONFIG, COST, POLICY, RandomRun
from tests.gpu_worker.replay.test_replay import Wall, rewrite

OTHER = replace(POLICY, version=3)
STEPS = 1_000  # of one start: three files, four minutes on the wall
HOUR = 60


def start(folder: Path, wall: Wall, epoch: int, *, worker_id: str = "worker-1", names: str = "") -> None:
    """One start of a worker, which is killed at its end; a minute later the next may come."""
    writer = LogWriter(folder, 1 << 24, wall)
    origin = Origin(worker_id=worker_id, epoch=epoch, model="toy")
    engine = RecordingScheduler(
        CONFIG, POLICY, COST, origin=origin, writer=writer, most_file_bytes=1 << 22, unix_s=wall
    )

    def next_file(step: int) -> None:
        if step % 400 == 399:
            wall.now_s += 120
            writer.catch_up()

    RandomRun(engine, epoch, names=names or f"{epoch}/").run(STEPS, next_file)
    writer.close()
    wall.now_s += 60


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, wall = tmp_path_factory.mktemp("recorded"), Wall()
    for epoch in (1, 2, 3):
        start(folder, wall, epoch)
    return folder


@pytest.fixture
def folder(recorded_once: Path, tmp_path: Path) -> Path:
    """Of a worker that was started three times; a test may spoil it."""
    return Path(shutil.copytree(recorded_once, tmp_path / "recorded"))


def numbers(starts: list[list[LogFile]]) -> list[tuple[int, int]]:
    """Epoch and number of files."""
    return [(files[0].boot().epoch, len(files)) for files in starts]


def submitted(files: list[LogFile]) -> Counter[str]:
    return Counter(entry.fields["request_id"] for entry in entries_of(files) if isinstance(entry, Submitted))


def counted(run: dict[str, Any], figure: str) -> int:
    return sum(row[figure] for row in run["classes"].values())


def respelled(file: LogFile, change: Any) -> None:
    """The file's entries, each as ``change`` makes it."""
    entries: list[Entry] = [change(entry) for _, some in file.frames() for entry in some]
    rewrite(file.path, entries)


def by_another_engine(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, engine="0123") if isinstance(entry, Boot) else entry


def decided_otherwise(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, records=b"") if isinstance(entry, Stepped) else entry


# which files


@pytest.mark.parametrize(
    ("minutes", "found"),
    [
        (HOUR, [(1, 3), (2, 3), (3, 3)]),
        (10, [(1, 1), (2, 3), (3, 3)]),
        (6, [(2, 2), (3, 3)]),
        (2, [(3, 2)]),
        (None, [(3, 3)]),
    ],
)
def test_the_last_minutes_of_a_worker_reach_back_over_its_starts(
    folder: Path, minutes: int | None, found: list[tuple[int, int]]
) -> None:
    starts = log_starts(folder, minutes)
    assert numbers(starts) == found
    assert all(files == sorted(files, key=lambda file: file.path) for files in starts)
    assert [file.path for file in log_files(folder, minutes)] == [file.path for file in starts[-1]]


def test_what_was_last_written_to_before_those_minutes_is_not_of_them(folder: Path) -> None:
    for file in log_starts(folder, HOUR)[0]:
        os.utime(file.path, (Wall().now_s - 3 * HOUR * 60,) * 2)
    assert numbers(log_starts(folder, HOUR)) == [(2, 3), (3, 3)]


def test_another_worker_that_records_beside_it_is_passed_by(tmp_path: Path) -> None:
    wall = Wall()
    for epoch, worker_id in ((1, "worker-1"), (2, "worker-2"), (3, "worker-1")):
        start(tmp_path, wall, epoch, worker_id=worker_id)
    assert numbers(log_starts(tmp_path, HOUR)) == [(1, 3), (3, 3)]


@pytest.mark.parametrize("num_bytes", [0, 10, 21, 40], ids=["empty", "half a head", "head", "half a frame"])
def test_a_file_whose_process_died_before_it_held_anything_is_passed_by(folder: Path, num_bytes: int) -> None:
    first = log_starts(folder, HOUR)[1][0]
    path = first.path.with_name(first.path.name.replace("-2-", "-0-"))
    path.write_bytes(first.path.read_bytes()[:num_bytes])
    assert numbers(log_starts(folder, HOUR)) == [(1, 3), (2, 3), (3, 3)]


# what they tell


def test_figures_of_all_starts_are_joined(folder: Path) -> None:
    starts = log_starts(folder, HOUR)
    alone = [what_if([files], OTHER, draws=1) for files in starts]
    joined, beside = (what_if(starts, OTHER, draws=1, processes=processes) for processes in (1, 2))
    assert beside == joined
    assert counted(joined["happened"], "requests") == sum(submitted(files).total() for files in starts)
    for run in ("happened", "model", "what_if"):
        for figure in ("requests", "completed", "open", "tokens", "step_time_holds"):
            assert counted(joined[run], figure) == sum(counted(each[run], figure) for each in alone), figure
        gaps = [each[run]["fairness_gap_ms"] for each in alone]
        assert joined[run]["fairness_gap_ms"] == {name: max(gap[name] for gap in gaps) for name in gaps[0]}
        spans_s = [each[run]["span_s"] for each in alone]
        assert joined[run]["span_s"] == pytest.approx(sum(spans_s), abs=0.01)
    assert joined["steps"] == sum(each["steps"] for each in alone)
    assert joined["unserved"] == sum(each["unserved"] for each in alone)
    assert joined["starts_unix_us"] == [files[0].boot().started_unix_us for files in starts[1:]]
    assert alone[0]["starts_unix_us"] == joined["left_out"] == []
    assert "started anew in it (1970-01-12 13:51:40 UTC, 1970-01-12 13:56:40 UTC)" in comparison(joined)


def test_a_request_that_comes_again_after_a_start_counts_once(tmp_path: Path) -> None:
    wall = Wall()
    start(tmp_path, wall, 1, names="r")
    start(tmp_path, wall, 2, names="r")
    starts = log_starts(tmp_path, HOUR)
    first, second = (submitted(files) for files in starts)
    assert first & second
    answer = what_if(starts, OTHER, draws=1)
    for run in ("happened", "model", "what_if"):
        assert counted(answer[run], "requests") == (first | second).total()
    assert answer["unserved"] <= what_if([starts[1]], OTHER, draws=1)["unserved"] + (first - second).total()


@pytest.mark.parametrize("number", [0, 1], ids=["with its beginning", "from its middle on"])
def test_an_earlier_start_that_another_engine_decided_is_left_out_and_said(folder: Path, number: int) -> None:
    first = log_starts(folder, HOUR)[0]
    for file in first:
        respelled(file, by_another_engine)
    for file in first[:number]:
        file.path.unlink()
    respelled(first[number], decided_otherwise)
    starts = log_starts(folder, HOUR)
    answer = what_if(starts, OTHER, draws=1)
    num_requests = submitted(starts[0]).total()
    began_us = starts[0][0].boot().started_unix_us
    why = "another version of the engine decided then"
    assert answer["left_out"] == [{"began_unix_us": began_us, "requests": num_requests, "why": why}]
    assert answer["happened"] == what_if(starts[1:], OTHER, draws=1)["happened"]
    assert f"left out: {num_requests} requests of an earlier start, recorded from 1970-01-12" in comparison(answer)


def test_another_engine_that_decided_the_same_is_replayed(folder: Path) -> None:
    before = what_if(log_starts(folder, HOUR), OTHER, draws=1)
    for file in log_starts(folder, HOUR)[0]:
        respelled(file, by_another_engine)
    assert what_if(log_starts(folder, HOUR), OTHER, draws=1) == before


def test_a_damaged_log_of_an_earlier_start_is_left_out_and_of_the_last_one_refused(folder: Path) -> None:
    starts = log_starts(folder, HOUR)
    for files in (starts[0], starts[-1]):
        body = bytearray(files[-1].path.read_bytes())
        body[-20] ^= 0xFF
        files[-1].path.write_bytes(body)
    with pytest.raises(LogError, match="is damaged"):
        what_if(starts, OTHER, draws=1)
    (left_out,) = what_if(starts[:-1], OTHER, draws=1)["left_out"]
    assert left_out["why"] == "its log is damaged"
    assert submitted(starts[0][:-1]).total() <= left_out["requests"] < submitted(starts[0][:-1]).total() + 100


@pytest.mark.parametrize("number", [0, -1], ids=["earlier", "last"])
def test_what_this_engine_decided_otherwise_than_on_record_is_never_passed_over(folder: Path, number: int) -> None:
    starts = log_starts(folder, HOUR)
    respelled(starts[number][0], decided_otherwise)
    with pytest.raises(Diverged):
        what_if(log_starts(folder, HOUR), OTHER, draws=1)


def test_the_command_replays_the_minutes_that_it_is_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps(snapshot_to_dict(OTHER)))
    assert main([str(folder), f"--policy={policy}", "--minutes=60", "--draws=1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    everybody = sum(submitted(files).total() for files in log_starts(folder, HOUR))
    assert counted(answer["happened"], "requests") == everybody
    assert len(answer["log"]) == 9
