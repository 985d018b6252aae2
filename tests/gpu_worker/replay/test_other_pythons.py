"""The same calls give the same decisions under every Python that is supported, whatever the hash seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_worker.replay.random_run import digest_of

SEED, NUM_STEPS = 21, 1_500


def digest_by(command: list[str], root: Path, hash_seed: str) -> str | None:
    """None where there is no such Python."""
    script = [*command, "-m", "tests.gpu_worker.replay.random_run", str(SEED), str(NUM_STEPS)]
    environment = {"PYTHONPATH": str(root), "PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin:/usr/local/bin"}
    try:
        told = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=root, timeout=120)
    except FileNotFoundError:
        return None
    return told.stdout if told.returncode == 0 else None


def pythons() -> list[str]:
    """Whatever a version manager or the system has of them."""
    installed = Path(sys.base_prefix).parent.glob("3.1[2-9]*/bin/python3")
    return [*map(str, sorted(installed)), "/usr/bin/python3.12", "/usr/local/bin/python3.12"]


def test_the_hash_seed_decides_nothing(project_root: Path) -> None:
    assert {digest_by([sys.executable], project_root, seed) for seed in ("1", "2")} == {digest_of(SEED, NUM_STEPS)}


def test_other_pythons_decide_alike(project_root: Path) -> None:
    found = {path: digest for path in pythons() if (digest := digest_by([path], project_root, "3")) is not None}
    if not found:
        pytest.skip("no other Python is installed here")
    assert set(found.values()) == {digest_of(SEED, NUM_STEPS)}, found
