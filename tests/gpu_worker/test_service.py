"""What a worker serves over the Bus: nothing lost, nothing twice, whatever the Bus does meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_engine.policy import PolicySnapshot, gpu_classes
from tests.gpu_worker.service_stage import Stage
from wire.bus import BadEntry
from wire.messages import Cancel, Finished


def test_a_response_travels_from_inbox_to_outbox_and_into_the_books(stage: Stage, small_worker: Any) -> None:
    stage.send(small_worker.submit(max_tokens=20))
    end = stage.until_end("r1")
    assert isinstance(end, Finished)
    assert stage.indexes("r1") == list(range(20))
    assert [usage.output_tokens for usage in stage.usages()] == [20]


def test_a_step_whose_answer_was_lost_is_neither_lost_nor_seen_twice(stage: Stage, small_worker: Any) -> None:
    stage.bus.failures_after = 3
    stage.send(small_worker.submit(max_tokens=30))
    stage.until_end("r1")
    assert stage.indexes("r1") == list(range(30))
    assert len(stage.usages()) == 1


def test_tokens_made_while_the_bus_was_away_arrive_in_order_when_it_is_back(stage: Stage, small_worker: Any) -> None:
    stage.bus.failures_before = 3
    stage.send(small_worker.submit(max_tokens=30))
    stage.until_end("r1")
    assert stage.indexes("r1") == list(range(30))


def test_a_message_that_is_not_understood_is_skipped_and_the_next_one_is_served(
    stage: Stage, small_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.bus.not_understood = [
        BadEntry("7-0", "version 9, this process speaks 1"),
        BadEntry("8-0", "unknown kind 'X'"),
    ]
    stage.until(lambda: not stage.bus.not_understood)
    stage.send(small_worker.submit(max_tokens=3))
    assert stage.until_end("r1").output_tokens == 3
    said = capsys.readouterr().err
    assert "skipped entry 7-0: version 9, this process speaks 1" in said
    assert "skipped entry 8-0: unknown kind 'X'" in said


def test_a_policy_that_arrives_over_the_bus_is_taken(stage: Stage) -> None:
    stage.hub.set_policy(PolicySnapshot(version=77, classes=gpu_classes()))
    stage.until(lambda: stage.hub.loads["w1"][1].policy_version == 77)
    assert stage.hub.loads["w1"][1].policy_version == 77


def test_a_cancel_frees_its_place_while_others_run(stage: Stage, small_worker: Any) -> None:
    stage.send(small_worker.submit("long", max_tokens=1_900))
    stage.until(lambda: len(stage.indexes("long")) > 2)
    stage.send(Cancel(response_id="long", attempt=1, reason="client"))
    stage.until_end("long")
    assert stage.usages()[0].terminal == "cancelled_client"
    assert stage.usages()[0].output_tokens == len(stage.indexes("long"))
