"""``python -m gpu_worker.replay`` as an operator meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.replay.command import main
from gpu_worker.replay.record_log import Boot, Closed, Entry, LogFile, Stepped, Submitted, log_files
from gpu_worker.replay.rerun import entries_of
from tests.gpu_worker.replay.test_replay import recorded, rewrite


def test_a_log_that_decides_the_same_again_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest, num_steps = recorded(tmp_path, 1, 300)
    assert main([str(tmp_path), "--json"]) == 0
    line, document = capsys.readouterr().out.splitlines()
    assert line == f"{num_steps} steps decided again as they were recorded; digest {digest}"
    assert json.loads(document) == {
        "files": [str(log_files(tmp_path)[0].path)],
        "steps": num_steps,
        "digest": digest,
        "equal": True,
        "cut": False,
    }


def test_a_request_is_explained_from_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 1, 600)
    assert main([str(tmp_path), "--explain=r3", "--json"]) == 0
    *told, document = capsys.readouterr().out.splitlines()
    explanation = json.loads(document)["explanation"]
    assert sum(wait["us"] for wait in explanation["waits"]) == explanation["queue_us"] + explanation["paused_us"]
    assert any("ms  let in" in line for line in told)


def test_a_request_that_the_log_does_not_know_is_not_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, 1, 100)
    assert main([str(tmp_path), "--explain=nobody"]) == 2
    assert "knows no request 'nobody'" in capsys.readouterr().err


def test_a_difference_ends_with_1_and_names_step_and_both_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, 1, 300)
    entries = list(entries_of(log_files(tmp_path)))
    index = next(i for i, entry in enumerate(entries) if isinstance(entry, Stepped) and entry.records and i > 100)
    entry = entries[index]
    assert isinstance(entry, Stepped)
    entries[index] = msgspec.structs.replace(entry, records=b"")
    path = rewrite(tmp_path / "flipped.rlog", entries)
    assert main([str(path), "--json"]) == 1
    output = capsys.readouterr().out
    document = json.loads(output.splitlines()[-1])
    assert f"step {document['step']}: a decision is another" in output
    assert document["recorded"] is None
    assert document["replayed"]["step"] == document["step"]


def test_a_log_that_cannot_be_used_ends_with_2_and_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.endswith("absent: No such file or directory\n")


def test_a_log_of_another_engine_is_replayed_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 1, 100)
    entries = list(entries_of(log_files(tmp_path)))
    entries[0] = msgspec.structs.replace(entries[0], engine="0123")  # type: ignore[type-var]
    assert main([str(rewrite(tmp_path / "other.rlog", entries))]) == 0
    assert "recorded by engine 0123, and this is engine" in capsys.readouterr().err
    assert LogFile(tmp_path / "other.rlog").boot().engine == "0123"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Stepped, {"records": b"\xff"}),
        (Submitted, {"fields": {}}),
        (Submitted, {"num_delivered_tokens": 10**12}),
        (Boot, {"cost": {}}),
        (Boot, {"step": 7}),
        (Closed, {"num_steps": 7}),
    ],
    ids=["records", "fields", "delivered", "cost", "begun late", "miscounted"],
)
def test_a_log_with_right_checksums_that_no_engine_wrote_ends_with_2_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Entry], change: dict[str, Any]
) -> None:
    recorded(tmp_path, 1, 300)
    entries = list(entries_of(log_files(tmp_path)))
    index = next(i for i, entry in enumerate(entries) if isinstance(entry, kind) and (kind is not Stepped or i > 100))
    entries[index] = msgspec.structs.replace(entries[index], **change)
    path = rewrite(tmp_path / "forged.rlog", entries)
    assert main([str(path)]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert str(path) in told[-1]
    assert not any("Traceback" in line for line in told)


def test_a_log_that_begins_anew_in_its_middle_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 1, 100)
    entries = list(entries_of(log_files(tmp_path)))
    entries.insert(20, entries[0])
    assert main([str(rewrite(tmp_path / "twice.rlog", entries))]) == 2
    assert "begins anew before it was closed" in capsys.readouterr().err


def test_a_step_without_its_link_of_the_digests_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, 1, 100)
    entries = list(entries_of(log_files(tmp_path)))
    index = next(i for i, entry in enumerate(entries) if isinstance(entry, Stepped))
    entries[index] = msgspec.structs.replace(entries[index], link=b"")  # type: ignore[type-var]
    assert main([str(rewrite(tmp_path / "unlinked.rlog", entries))]) == 1
    assert "the plan is another" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--draws=3"], ["--seconds=3"], ["--policy=p.json", "--explain=r1"]])
def test_a_flag_that_would_be_ignored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), *flags])
    assert ended.value.code == 2
    assert "does nothing" in capsys.readouterr().err
