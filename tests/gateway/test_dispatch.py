"""Which worker, from snapshots alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.dispatch import Choice, choose
from gateway.errors import Refusal
from scheduler_engine.policy import PriorityClass
from wire.messages import ClassSnapshot, Histogram, LoadSnapshot

NO_TIME = Histogram(counts=(0,) * 16, sum_us=0)
INTERACTIVE, DEFAULT, BATCH = PriorityClass


def row(priority_class: PriorityClass, start_us: int = 0) -> ClassSnapshot:
    return ClassSnapshot(
        priority_class=priority_class,
        num_waiting=0,
        num_running=0,
        num_suspended=0,
        waiting_gpu_us=0,
        estimated_start_q50_us=start_us,
        estimated_start_q90_us=start_us,
        closed=False,
        retry_after_us=None,
        prompt_tokens=0,
        output_tokens=0,
        queue_wait=NO_TIME,
        ttft=NO_TIME,
        preemptions=(),
        shed=(),
    )


def load(worker_id: str, start_us: int = 0) -> LoadSnapshot:
    return LoadSnapshot(
        worker_id=worker_id,
        epoch=7,
        model="m",
        ready=True,
        draining=False,
        max_model_len=2_048,
        last_step_age_us=0,
        step=1,
        num_blocks=1,
        num_free_blocks=1,
        num_host_blocks=0,
        num_free_host_blocks=0,
        num_slots=1,
        num_free_slots=1,
        policy_version=1,
        prompt_tokens_total=0,
        output_tokens_total=0,
        busy_us_total=0,
        classes=tuple(row(c, start_us) for c in PriorityClass),
    )


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
