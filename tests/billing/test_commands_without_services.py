"""The commands of the books say what is missing in one sentence, and never with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = "127.0.0.1:1"


def run(root: Path, data: Path, command: str, **addresses: str) -> subprocess.CompletedProcess[str]:
    services = ("DATABASE_URL", "DATABASE_TENANT_URL", "DATABASE_OWNER_URL", "REDIS_URL")
    environment = {name: value for name, value in os.environ.items() if name not in services}
    return subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=root,
        env={**environment, "RUBATO_DATA": str(data), **addresses},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["reconcile", "settle_usage"])
def test_where_no_services_are_known_the_command_says_how_to_get_them(
    project_root: Path, tmp_path: Path, command: str
) -> None:
    ended = run(project_root, tmp_path, command)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "No services are running here: start the platform with 'manage.py up'" in ended.stderr


def test_a_redis_that_does_not_answer_is_one_sentence(project_root: Path, tmp_path: Path) -> None:
    urls = {"DATABASE_URL": f"postgresql://app_ops@{NOBODY}/none", "REDIS_URL": f"redis://{NOBODY}/0"}
    ended = run(project_root, tmp_path, "reconcile", **urls)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "Redis does not answer" in ended.stderr


def test_a_database_that_does_not_answer_is_one_sentence(project_root: Path, tmp_path: Path, valkey: str) -> None:
    urls = {"DATABASE_URL": f"postgresql://app_ops@{NOBODY}/none", "REDIS_URL": valkey}
    ended = run(project_root, tmp_path, "reconcile", **urls)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "The database does not answer" in ended.stderr
