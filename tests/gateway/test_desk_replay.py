"""The replay beside an edit: a process that can be stopped, and what is told of it."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.console.templatetags.desk import replay_rows
from gateway.desk import preview
from gateway.desk.preview import Previews
from gateway.desk.replaying import FEW_MINUTES
from scheduler_engine.policy import PolicySnapshot, gpu_classes, snapshot_to_dict
from tests.gateway.desk_world import document


@pytest.fixture
def previews(valkey: str, settings: Any, tmp_path: Any) -> Previews:
    settings.REDIS_URL, settings.RUBATO_REDIS_PREFIX = valkey, "desk-test:"
    settings.RUBATO_RECORDED_DIR = str(tmp_path / "recorded")
    return Previews()


@pytest.fixture(scope="module")
def recorded_story(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Any:
    """A short trace on the small device, as a worker records it."""
    folder = tmp_path_factory.mktemp("recorded")
    trace = project_root / "traces" / "azure2023_conv.csv.gz"
    command = [sys.executable, "-m", "gpu_worker.simulate", "--trace", f"interactive={trace}", "--limit", "20"]
    subprocess.run(
        [*command, "--device", "h200-8b", "--record", str(folder)], check=True, cwd=project_root, capture_output=True
    )
    return SimpleNamespace(folder=folder, policy=snapshot_to_dict(PolicySnapshot(version=2, classes=gpu_classes())))


def settled(previews: Previews, draft_id: str) -> preview.Preview:
    """Waits for the thread that watches the replay, not for a time."""
    for thread in threading.enumerate():
        if thread.name == "policy preview":
            thread.join(60)
    found = previews.find(draft_id)
    assert found is not None
    return found


def test_without_a_recording_the_preview_says_so(previews: Previews) -> None:
    assert previews.start("draft", document()).doing == "no worker has recorded any traffic here yet"


def test_a_recorded_story_is_replayed_under_the_edit(previews: Previews, recorded_story: Any, settings: Any) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    edit = copy.deepcopy(recorded_story.policy)
    edit["classes"]["batch"]["floor_percent"] = 0
    assert previews.start("draft", edit).state == "running"
    found = settled(previews, "draft")
    assert (found.state, found.percent) == ("done", 100), found
    assert set(found.result) >= {"happened", "model", "what_if", "error_percent"}
    rows = list(replay_rows(found.result, "classes"))
    assert {row["run"] for row in rows} == {"happened", "model", "this edit"}
    for run in {row["run"] for row in rows}:
        assert sum(row["share_percent"] for row in rows if row["run"] == run) == pytest.approx(100)


def test_a_log_that_cannot_be_read_is_told_in_a_sentence(previews: Previews, settings: Any) -> None:
    folder = Path(settings.RUBATO_RECORDED_DIR)
    folder.mkdir()
    previews.start("draft", document())
    found = settled(previews, "draft")
    assert found.state == "failed"
    assert "Traceback" not in found.doing
    assert "the recording" in found.doing
    assert not any(word in found.doing for word in (str(folder), "--", "gpu_worker"))


def test_a_stopped_preview_stays_stopped(previews: Previews, recorded_story: Any, settings: Any) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    previews.start("draft", recorded_story.policy)
    previews.stop("draft")
    assert settled(previews, "draft").state == "stopped"


def test_a_replay_that_was_stopped_can_be_asked_for_again_and_of_less(
    previews: Previews, recorded_story: Any, settings: Any
) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    previews.start("draft", recorded_story.policy)
    previews.stop("draft")
    again = previews.start("draft", recorded_story.policy, FEW_MINUTES)
    assert (again.state, again.minutes) == ("running", 5)
    found = settled(previews, "draft")
    assert (found.state, found.run) == ("done", again.run)


def test_one_that_runs_is_not_begun_twice(previews: Previews, recorded_story: Any, settings: Any) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    first = previews.start("draft", recorded_story.policy)
    assert previews.start("draft", recorded_story.policy, FEW_MINUTES).run == first.run
    assert settled(previews, "draft").state == "done"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"floor_percent": 99},
            "this edit is no policy: classes: floor_percent of all classes must sum to at most 100",
        ),
        ({"chunk_min": 0}, "this edit is no policy: classes.batch.chunk_min must be an integer from 1"),
    ],
    ids=["whole", "field"],
)
def test_a_replay_that_fails_says_why_and_names_no_flag_and_no_file(
    previews: Previews, recorded_story: Any, settings: Any, fault: dict[str, int], said: str
) -> None:
    settings.RUBATO_RECORDED_DIR = str(recorded_story.folder)
    edit = copy.deepcopy(recorded_story.policy)
    edit["classes"]["batch"].update(fault)
    previews.start("draft", edit)
    found = settled(previews, "draft")
    assert (found.state, found.doing[: len(said)]) == ("failed", said)
    assert not any(word in found.doing for word in ("/", "--", "gpu_worker"))
