"""A rival's scheduler beside ours: how it is spoken with, what is compared, and what happens where it is absent."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rival as rivals
from benchmarks import scheduler
from benchmarks.rival import RivalAbsent, best_tuned, medians, quiet_steps, rows_table, running, told_to_both
from gpu_worker.simulation.stories import STORIES, Story
from gpu_worker.simulation.traffic import Arrival, submit_of
from scheduler_engine.policy import PriorityClass

SMALL = ["--running=32", "--waiting=50", "--tenants=4", "--steps=5", "--json", "--rival=vllm"]
RIVAL_PYTHON = os.environ.get("RUBATO_RIVAL_PYTHON")  # a Python that has vLLM
needs_rival = pytest.mark.skipif(not RIVAL_PYTHON, reason="RUBATO_RIVAL_PYTHON names no Python that has vLLM")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Speaks as a rival does: noise, its version, then 1 ms to plan and 2 ms to apply for whatever is asked."""
    path = tmp_path / "python"
    answer = json.dumps({"plan_ns": [1_000_000] * 3, "apply_ns": [2_000_000] * 3})
    lines = [
        "#!/bin/sh",
        "echo loading",
        """echo '{"version": "7"}'""",
        f"while read -r line; do echo '{answer}'; done",
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def row(p99_ms: float, batch_s: float) -> dict[str, Any]:
    return {
        "chats": 9,
        "ttft_ms": {"p50": 1.0, "p99": p99_ms},
        "itl_ms": {"p99": 5.0},
        "batch_work_s": batch_s,
        "preemptions": 0,
    }


def test_the_rivals_steps_have_the_keys_of_ours(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduler.main([*SMALL, f"--rival-python={stand_in}"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    keys = ("step_ms_p50", "step_ms_p99", "plan_ms_p50", "apply_ms_p50")
    assert [found["rival"][key] for key in keys] == [3.0, 3.0, 1.0, 2.0]
    assert all(found[key] > 0 for key in keys)


@pytest.mark.parametrize("path", [None, "/nowhere/python", "/bin/false"])
def test_an_absent_rival_is_a_reason_and_no_failure(path: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduler.main([*SMALL, *([] if path is None else [f"--rival-python={path}"])]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["rival"] is None
    assert "--rival skipped" in captured.err


def test_a_rival_that_dies_says_its_last_words(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 'No module named vllm' >&2\n")
    path.chmod(0o755)
    with pytest.raises(RivalAbsent, match="No module named vllm"), running("vllm", path):
        pass


def test_an_unknown_story_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scheduler.main([*SMALL, "--stories=flood,fairy-tale"])
    assert "fairy-tale" in capsys.readouterr().err


def test_the_tuned_rival_is_the_best_tail_among_flags_that_do_our_batch_work() -> None:
    rows = {
        "rubato": row(100, 50),
        rivals.DEFAULT_NAME: row(120, 60),  # not tuned
        "quick but idle": row(50, 20),
        "good": row(180, 49.5),
        "worse": row(200, 55),
    }
    assert best_tuned(rows) == ("good", 1.8)
    assert "1.80 times ours (good)" in rows_table("flood", rows)
    assert best_tuned({"rubato": row(100, 50), "quick but idle": row(50, 20)}) is None


def test_medians_are_taken_figure_by_figure() -> None:
    seeds = [{"rubato": row(p99, batch)} for p99, batch in ((100, 9), (300, 7), (200, 8))]
    found = medians(seeds)["rubato"]
    assert (found["ttft_ms"]["p99"], found["batch_work_s"]) == (200, 8)


@needs_rival
def test_a_lone_chat_takes_the_same_time_with_the_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two cost models are one: what differs between the rows of a story is decided by the schedulers."""
    chat = submit_of("a", "aurora", PriorityClass.INTERACTIVE, prompt_tokens=500, max_tokens=40)
    batch = submit_of("b", "bulk", PriorityClass.BATCH, prompt_tokens=700, max_tokens=1)
    lonely = [Arrival(0, chat), Arrival(5_000_000, batch)]
    monkeypatch.setitem(STORIES, "lonely", Story(lambda seed, pace: lonely, (0, 10)))
    monkeypatch.setattr(rivals, "SWEPT", ())
    with running("vllm", Path(RIVAL_PYTHON or "")) as rival:
        rows = told_to_both(rival, "lonely", seed=1, window_s=10)
        assert quiet_steps(rival, running=4, waiting=4, steps=3, prompt=8)["step_ms_p50"]
    ours, theirs = rows["rubato"], rows[rivals.DEFAULT_NAME]
    assert {key: ours[key] for key in theirs} == theirs
