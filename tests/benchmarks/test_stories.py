"""The tables of the simulator as Markdown: whole, and refused by name where the arguments are wrong."""

from __future__ import annotations

import pytest

from benchmarks import stories
from benchmarks.stories import KNOBS, MIXES, Mix, markdown
from gpu_worker.simulation.knobs import with_changes
from gpu_worker.simulation.stories import STORIES, Story
from gpu_worker.simulation.traffic import Arrival, submit_of
from scheduler_engine.policy import PriorityClass


def a_chat_beside_batch() -> list[Arrival]:
    bulk = [
        Arrival(0, submit_of(f"b{i}", "bulk", PriorityClass.BATCH, prompt_tokens=900, max_tokens=40)) for i in range(9)
    ]
    chat = submit_of("chat", "aurora", PriorityClass.INTERACTIVE, prompt_tokens=40, max_tokens=10)
    return [*bulk, Arrival(100_000, chat)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORIES, "flood", Story(lambda seed, pace: a_chat_beside_batch(), (0, 1), has_targets=True))


def test_a_story_is_a_table_of_figures_with_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert stories.main(["--parts", "stories", "--stories", "flood", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "`flood`, 2 seeds:"
    (row,) = [line for line in lines if line.startswith("| times alone")]
    assert row.count("|") == 6
    assert "≤ 2.5" in row


def test_traces_are_a_row_a_class_and_a_row_a_loud_tenant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "servegen_offline_d_sample160"
    mixes = (Mix("arena", ("lmsys_arena_27tenants_10min", job), 1), Mix("loud", ("servegen_mlarge_1h",), 1, speed=4.0))
    monkeypatch.setattr(stories, "MIXES", mixes)
    assert stories.main(["--parts", "traces"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines if line.startswith("| arena")] == [
        ["| arena", "interactive"],
        ["| arena", "batch"],
    ]
    assert any(line.startswith("| loud | c104 |") for line in lines)


def test_a_knob_is_a_row_a_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stories, "KNOBS", (("flood", 5, "batch.token_budget_max", (512, 2_048), ("times alone",)),))
    assert stories.main(["--parts", "knobs"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `batch")]
    assert ["512" in rows[0], "2,048" in rows[1], "times alone: " in rows[0]] == [True, True, True]


def test_every_knob_of_the_table_is_a_field_with_values_that_the_policy_takes() -> None:
    for _, _, field, values, _ in KNOBS:
        for value in values:
            with_changes(stories.POLICY, [f"{field}={value}", *stories._followers(field, value)])
    assert all((stories.TRACES / f"{name.rpartition('=')[2]}.csv.gz").exists() for mix in MIXES for name in mix.files)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--parts", "songs"], "songs"), (["--stories", "fairy-tale"], "fairy-tale"), (["--seeds", "0"], "--seeds")],
)
def test_a_wrong_argument_is_refused_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stories.main(arguments)
    assert words in capsys.readouterr().err


def test_markdown_has_a_rule_under_its_header() -> None:
    assert markdown(("a", "b"), [("1", "2")]).splitlines() == ["| a | b |", "|---|---|", "| 1 | 2 |"]
