"""The benchmarks as programs: what their last line holds, what they need, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gateway_rival
from benchmarks.chats import Kind, caller, open_loop
from benchmarks.figures import quantile
from benchmarks.serving import is_loopback


def run(project_root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=project_root, capture_output=True, text=True, check=False, timeout=180
    )


@pytest.mark.parametrize("program", [["-m", "benchmarks.scheduler"], ["benchmarks/scheduler.py"]])
def test_the_schedulers_last_line_is_its_contract(project_root: Path, program: list[str]) -> None:
    small = ["--running=32", "--waiting=500", "--tenants=10", "--steps=20", "--json"]
    done = run(project_root, *program, *small)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert min(found[name] for name in ("step_ms_p50", "step_ms_p99", "plan_ms_p50", "apply_ms_p50")) > 0
    assert min(found[name] for name in ("arrival_us", "abort_us", "victims_plan_ms_p50")) > 0
    assert (found["rows"], found["preemptions_in_quiet_steps"], found["victims"]) == (32, 0, 16)


def test_the_scheduler_is_measured_without_django(project_root: Path) -> None:
    program = "import benchmarks.scheduler, sys; sys.exit('django' in sys.modules or 'torch' in sys.modules)"
    assert run(project_root, "-c", program).returncode == 0


def test_the_prefix_benchmark_says_which_model_it_lacks(project_root: Path) -> None:
    done = run(project_root, "-m", "benchmarks.prefix", "--model=/nowhere.gguf")
    assert done.returncode == 2
    assert "no model at /nowhere.gguf" in done.stderr


def test_a_rival_that_is_not_installed_is_told_how_to_install_it(tmp_path: Path) -> None:
    assert gateway_rival.program_of(tmp_path / "python") is None
    (tmp_path / "litellm").touch()
    assert gateway_rival.program_of(tmp_path / "python") == tmp_path / "litellm"


async def test_an_open_loop_asks_at_its_rate_whatever_has_been_answered() -> None:
    num_waiting = most = 0

    async def ask() -> float:
        nonlocal num_waiting, most
        num_waiting += 1
        most = max(most, num_waiting)
        await asyncio.sleep(0.2)
        num_waiting -= 1
        return 0.2

    took, rate = await open_loop(ask, per_s=100, seconds=0.3)
    assert len(took) == 30
    assert most > 10
    assert rate <= 110


async def test_fields_of_a_rivals_own_go_into_every_body() -> None:
    async with caller("http://127.0.0.1:9", None) as one:
        kind = Kind(model="m", num_words=3, output_tokens=2, tier=None, fields={"priority": 10})
        bodies = [one.body(kind, stream=stream) for stream in (False, True)]
    assert [body["priority"] for body in bodies] == [10, 10]
    assert "service_tier" not in bodies[0]


def test_fields_that_are_no_json_object_are_refused(project_root: Path) -> None:
    done = run(project_root, "-m", "benchmarks.engine", "--base-url=http://127.0.0.1:9", "--chat-fields=[1]")
    assert done.returncode == 2
    assert "--chat-fields" in done.stderr


def test_a_server_elsewhere_is_not_measured_by_mistake(project_root: Path) -> None:
    done = run(project_root, "-m", "benchmarks.engine", "--base-url=http://192.0.2.1:8000")
    assert done.returncode == 2
    assert "--not-loopback" in done.stderr


def test_a_server_that_is_not_there_is_one_sentence(project_root: Path) -> None:
    done = run(project_root, "-m", "benchmarks.engine", "--base-url=http://127.0.0.1:9", "--model=m")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [("http://127.0.0.1:1", True), ("http://[::1]:1/v1", True), ("http://localhost", True), ("http://10.0.0.1", False)],
)
def test_loopback_is_told_from_the_rest(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_a_quantile_is_the_smallest_value_that_enough_others_do_not_pass() -> None:
    assert [quantile([3, 1, 2, 4], share) for share in (0.25, 0.5, 0.51, 1.0)] == [1, 2, 3, 4]
    assert quantile([], 0.5) is None


def test_the_relay_of_tokens_is_measured_on_a_platform_of_its_own(project_root: Path) -> None:
    done = run(project_root, "-m", "benchmarks.stream", "--readers=4", "--tokens=5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["sse"]["tokens"], found["websocket"]["tokens"]) == (20, 20)
