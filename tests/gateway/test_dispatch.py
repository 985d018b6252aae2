"""Which worker, from snapshots alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.dispatch import Choice, choose
from gateway.errors import Refusal
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.messages import LoadSnapshot

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def load(worker_id: str, start_us: int = 0) -> LoadSnapshot:
    starts = {"estimated_start_q50_us": start_us, "estimated_start_q90_us": start_us}
    rows = tuple(quiet_class(each, **starts) for each in PriorityClass)
    return quiet_load(worker_id=worker_id, epoch=7, model="m", classes=rows)


def closed(snapshot: LoadSnapshot, which: PriorityClass, retry_after_us: int | None) -> LoadSnapshot:
    rows = [
        replace(c, closed=True, retry_after_us=retry_after_us) if c.priority_class is which else c
        for c in snapshot.classes
    ]
    return replace(snapshot, classes=tuple(rows))


def test_the_worker_with_the_shortest_estimated_start_is_taken_with_the_epoch_it_had() -> None:
    assert choose([load("slow", 900), load("fast", 100)], "m", DEFAULT) == Choice("fast", 7, 2_048)


@pytest.mark.parametrize(
    "change", [{"ready": False}, {"draining": True}, {"model": "other"}], ids=["not ready", "draining", "other model"]
)
def test_a_worker_that_cannot_serve_is_503_with_a_moment_to_come_back(change: dict[str, object]) -> None:
    refusal = choose([replace(load("w"), **change)], "m", DEFAULT)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.row.code) == (503, "no_worker")
    assert "retry-after" in refusal.headers()


def test_a_closed_class_is_refused_with_the_workers_own_retry_after_and_the_others_go_on() -> None:
    loads = [closed(load("w"), DEFAULT, 4_000_000)]
    refusal = choose(loads, "m", DEFAULT)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.headers()["retry-after"]) == (503, "4")
    assert isinstance(choose(loads, "m", INTERACTIVE), Choice)


def test_a_closed_batch_class_is_429() -> None:
    refusal = choose([closed(load("w"), BATCH, None)], "m", BATCH)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 429


def test_one_open_worker_is_enough() -> None:
    choice = choose([closed(load("a"), DEFAULT, None), load("b", 1_000)], "m", DEFAULT)
    assert isinstance(choice, Choice)
    assert choice.worker_id == "b"
