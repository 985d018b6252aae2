"""``manage.py up`` where it cannot start: one sentence that helps, and nothing left running."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from gateway.management.commands import up


def _up(tmp_path: Path, **choices: object) -> None:
    call_command("up", **{"port": _free_port(), "data": tmp_path / "data", "executor": "simulated", **choices})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CommandError, match=rf"Port {port} is taken: .* --port\."):
            _up(tmp_path, port=port)


def test_a_model_that_is_not_there_is_named_with_the_way_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"No model at .*absent\.gguf: run 'make model'"):
        _up(tmp_path, executor="model", model=tmp_path / "absent.gguf")


@pytest.mark.parametrize("port", [-1, 0, 70_000])
def test_a_port_that_cannot_exist_is_refused_with_the_range(tmp_path: Path, port: int) -> None:
    with pytest.raises(CommandError, match=rf"--port must be from 1 to 65535, not {port}\."):
        _up(tmp_path, port=port)


def test_a_file_that_is_no_model_is_refused_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"garbage")
    with pytest.raises(CommandError, match=r"garbage\.gguf is no model that can be served: .*GGUF"):
        _up(tmp_path, executor="model", model=garbage)


def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(CommandError, match=r"--data must name a folder that can be written, and .*data is none"):
        _up(tmp_path)


def test_a_second_up_on_the_same_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match=r"Another 'manage\.py up' already uses .*data\."):
            _up(tmp_path)


def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(up.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 5 << 20))
    with pytest.raises(CommandError, match=r"Only 5 MiB are free for .*; the platform needs 512 MiB\."):
        _up(tmp_path)


def test_one_database_url_without_its_sisters_is_refused(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "DATABASE_URL": "postgresql://app_ops@127.0.0.1:1/rubato",
        "REDIS_URL": "redis://127.0.0.1:1",
    }
    command = [
        sys.executable,
        "manage.py",
        "up",
        "--executor=simulated",
        f"--data={tmp_path}",
        f"--port={_free_port()}",
    ]
    root = Path(up.__file__).resolve().parents[4]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DATABASE_TENANT_URL and DATABASE_OWNER_URL must be too" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
