"""A policy changed on the command line: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker import simulate
from gpu_worker.simulation.knobs import with_changes
from gpu_worker.simulation.stories import STORIES, Story
from gpu_worker.simulation.traffic import Arrival, submit_of
from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import PolicySnapshot, PriorityClass, gpu_classes, snapshot_to_dict

POLICY = PolicySnapshot(version=3, classes=gpu_classes())


def test_a_field_of_one_class_or_of_all_is_changed_and_nothing_else() -> None:
    found = with_changes(POLICY, ["interactive.hard_deadline_ms=900", "all.fairness_gap_ms=500", "batch.patience_ms=7"])
    assert found.version == 3
    assert [row.hard_deadline_ms for row in found.classes] == [900, None, None]
    assert [row.fairness_gap_ms for row in found.classes] == [500, 500, 500]
    assert found.classes[PriorityClass.BATCH].patience_ms == 7
    assert with_changes(found, ["interactive.hard_deadline_ms=null"]).classes[0].hard_deadline_ms is None
    assert with_changes(POLICY, []) == POLICY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("interactive.step_cap_percent", "must be CLASS.FIELD=VALUE"),
        ("step_cap_percent=20", "must be CLASS.FIELD=VALUE"),
        ("urgent.step_cap_percent=20", "interactive, default, batch or all"),
        ("interactive.colour=20", "unknown field 'colour'"),
        ("interactive.step_cap_percent=0", "step_cap_percent must be an integer from 1"),
        ("interactive.step_cap_percent=much", "step_cap_percent must be an integer from 1"),
        ("all.floor_percent=40", "sum to at most 100"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(
    change: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PolicyError, match=words):
        with_changes(POLICY, [change])
    assert simulate.main(["--set", change]) == 2
    assert words in capsys.readouterr().err


def test_a_run_obeys_the_policy_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [
        Arrival(0, submit_of(f"c{i}", "aurora", PriorityClass.INTERACTIVE, prompt_tokens=400, max_tokens=50))
        for i in range(40)
    ]
    monkeypatch.setitem(STORIES, "flood", Story(lambda seed, pace: chats, (0, 1)))
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(snapshot_to_dict(with_changes(POLICY, ["interactive.max_queue_wait_ms=100"]))))
    for arguments, num_shed in (
        ([], 0),
        (["--policy", str(path)], 1),
        (["--set", "interactive.max_queue_wait_ms=100"], 1),
    ):
        assert simulate.main(["--device", "toy", "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert min(1, found["classes"]["interactive"]["shed"]) == num_shed
    assert simulate.main(["--policy", str(tmp_path / "lost.json")]) == 2
    assert "lost.json" in capsys.readouterr().err
