"""Curves, pictures and trace files of a run."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpu_worker import simulate
from gpu_worker.simulation import plots
from gpu_worker.simulation.series import bins_of, composition, cumulative, shares
from gpu_worker.simulation.stories import STORIES, Story
from gpu_worker.simulation.traffic import Arrival, Pace, submit_of
from gpu_worker.simulation.watch import Second
from scheduler_engine.policy import PriorityClass

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def a_chat_beside_batch(seed: int, pace: Pace) -> list[Arrival]:
    """Eight batch requests fill the toy's slots, and a chat comes 100 ms later."""
    bulk = [Arrival(0, submit_of(f"b{i}", "bulk", BATCH, prompt_tokens=300, max_tokens=120)) for i in range(9)]
    return [*bulk, Arrival(100_000, submit_of("chat", "aurora", INTERACTIVE, prompt_tokens=40, max_tokens=10))]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORIES, "flood", Story(a_chat_beside_batch, (0, 1)))


@pytest.fixture
def trace_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    path = tmp_path / "run.json"
    assert simulate.main(["--device", "toy", "--trace-viewer", str(path)]) == 0
    assert "interactive" in capsys.readouterr().out
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_a_trace_file_has_a_span_for_every_step_and_none_overlap(trace_events: list[dict[str, Any]]) -> None:
    steps = [event for event in trace_events if event["ph"] == "X"]
    assert len(steps) > 120
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(steps))
    assert {"rows", "prefill_tokens", "budget"} == set(steps[0]["args"])


def test_the_spans_of_a_request_cover_it_from_arrival_to_end_without_gaps(trace_events: list[dict[str, Any]]) -> None:
    names = {event["args"]["name"] for event in trace_events if event["ph"] == "M"}
    assert names == {"device", "tenant aurora", "tenant bulk"}
    for name in ("chat", *(f"b{i}" for i in range(9))):
        own = [event for event in trace_events if event.get("id") == name]
        whole = [event["ts"] for event in own if event["name"] == name]
        inner = [(event["name"], event["ph"], event["ts"]) for event in own if event["name"] != name]
        assert [kind for kind, _, _ in inner[::2]][:2] == ["waits", "runs"]
        assert (inner[0][2], inner[-1][2]) == tuple(whole)
        ends, begins = inner[1:-1:2], inner[2::2]
        assert [at_us for _, _, at_us in ends] == [at_us for _, _, at_us in begins]


def test_somebody_paused_so_that_the_chat_could_run(trace_events: list[dict[str, Any]]) -> None:
    assert any(event["name"] == "paused" and event["cat"] == "batch" for event in trace_events)
    assert not any(event["name"] == "paused" and event["cat"] == "interactive" for event in trace_events)


def test_a_distribution_ends_at_one() -> None:
    assert cumulative(Counter({3_000: 1, 1_000: 3})) == ([1.0, 3.0], [0.75, 1.0])


def test_bins_cover_every_second_once_and_are_few() -> None:
    for last in (0, 7, 159, 160, 1_441):
        bins = bins_of(last)
        seconds = [second for each in bins for second in each]
        assert seconds[: last + 1] == list(range(last + 1))
        assert len(bins) <= 160


def test_composition_is_rows_a_step_and_tokens_a_second() -> None:
    seconds = {
        0: Second(steps=10, decodes=Counter({BATCH: 80}), prefill=Counter({BATCH: 500})),
        1: Second(steps=30, decodes=Counter({BATCH: 40}), prefill=Counter({INTERACTIVE: 100})),
    }
    decodes, prefill = composition(seconds, [range(2), range(2, 4)])
    assert (decodes[BATCH], decodes[DEFAULT]) == ([3.0, 0.0], [0.0, 0.0])
    assert (prefill[BATCH], prefill[INTERACTIVE]) == ([250.0, 0.0], [50.0, 0.0])


def test_shares_of_a_second_are_differences_and_small_tenants_are_others() -> None:
    charges = {
        0: {(BATCH, "bulk"): 0},
        1: {(BATCH, "bulk"): 700_000, (INTERACTIVE, "aurora"): 200_000, (INTERACTIVE, "nova"): 100_000},
        2: {(BATCH, "bulk"): 1_700_000, (INTERACTIVE, "aurora"): 200_000, (INTERACTIVE, "nova"): 100_000},
    }
    found = shares(charges, bins_of(1), most=1)
    assert found["bulk"] == [0.7, 1.0]
    assert found["others"] == pytest.approx([0.3, 0.0])


def test_three_pictures_are_drawn_and_each_is_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert simulate.main(["--device", "toy", "--plot", str(tmp_path / "pictures")]) == 0
    found = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in found] == ["composition.png", "shares.png", "ttft.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000 for path in found)


def test_without_matplotlib_it_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert simulate.main(["--plot", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs matplotlib" in captured.err


def test_a_trace_file_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate.main(["--trace-viewer", str(tmp_path / "nowhere" / "run.json")])
    assert "No such file" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(plots.PlotError, match="file"):
        plots.prepare(tmp_path / "file" / "pictures")
