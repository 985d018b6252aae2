"""``manage.py demo`` from start to exit, on a simulated device: what it says at the end, and what it leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.running_up import environment_of_its_own, free_port

NUM_BATCH = 112
LIMIT_S = 150
PROMISED_KEYS = {
    "idle_ttft_ms",
    "flooded_ttft_ms",
    "ratio_p50",
    "batch_requests",
    "batch_completed",
    "batch_tokens_per_s",
    "batch_alone_tokens_per_s",
    "calib_us",
    "preemptions",
    "reconcile",
}


@pytest.fixture(scope="module")
def told(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The demo that has ended. 4 MiB of KV hold three requests of the flood, and hardly a chat beside them."""
    data = tmp_path_factory.mktemp("demo") / "data"
    command = [sys.executable, "manage.py", "demo", "--exit", "--json", f"--port={free_port()}", f"--data={data}"]
    command += ["--executor=simulated", "--device-profile=toy", "--kv-mib=4"]
    command += [f"--batch={NUM_BATCH}", "--batch-alone=12"]
    done = subprocess.run(
        command,
        cwd=project_root,
        env=environment_of_its_own(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def figures(told: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def test_the_last_line_holds_every_promised_figure(figures: dict[str, Any]) -> None:
    assert set(figures) >= PROMISED_KEYS
    assert (len(figures["idle_ttft_ms"]), len(figures["flooded_ttft_ms"])) == (10, 6)
    assert set(figures["calib_us"]) == {"batch_alone", "idle before the flood", "flooded", "idle after the flood"}
    assert min(figures["batch_tokens_per_s"], figures["batch_alone_tokens_per_s"], figures["ratio_p50"]) > 0


def test_every_request_of_the_flood_completes_though_chats_went_through_it(figures: dict[str, Any]) -> None:
    assert figures["batch_requests"] == figures["batch_completed"] == NUM_BATCH
    assert set(figures["preemptions"]) <= {"hold", "swap", "recompute"}


def test_engine_ledger_and_roll_up_count_the_same_at_the_end(figures: dict[str, Any]) -> None:
    books = figures["reconcile"]
    assert set(books["differences"].values()) == {0}
    assert books["is_right"]
    flood_tokens = 64 * (NUM_BATCH + 12 + 1)
    assert books["engine"]["output_tokens"] == books["ledger"]["output_tokens"] >= flood_tokens


def test_the_story_is_told_on_the_terminal_while_it_runs(told: subprocess.CompletedProcess[str]) -> None:
    for sentence in ("serving on http", "idle chat before the flood", "chat through the flood", "websocket chat"):
        assert sentence in told.stderr


def left_of(data: str) -> list[object]:
    return [one.info for one in psutil.process_iter(["pid", "cmdline"]) if data in " ".join(one.info["cmdline"] or ())]


def test_nobody_is_left_running(told: subprocess.CompletedProcess[str]) -> None:
    assert left_of(next(word for word in told.args if word.startswith("--data=")).removeprefix("--data=")) == []


def test_a_ctrl_c_in_the_middle_that_arrives_twice_ends_the_demo_in_silence_and_order(
    project_root: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "manage.py", "demo", f"--port={free_port()}", f"--data={data}", "--executor=simulated"]
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=project_root, env=environment_of_its_own(), stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            lines.append(line)
            if "batch alone" in line:
                demo.send_signal(signal.SIGINT)
            if "stopping" in line:
                demo.send_signal(signal.SIGTERM)
    assert demo.returncode == 0
    assert lines[-1] == "demo     | stopping\n"
    assert left_of(str(data)) == []
