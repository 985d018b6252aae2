"""What a worker says of itself, for tests: quiet in all that a test does not name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler_engine.policy import PriorityClass
from wire.snapshots import HISTOGRAM_BOUNDS_MS, ClassSnapshot, Histogram, LoadSnapshot

NO_TIME = Histogram(counts=(0,) * (len(HISTOGRAM_BOUNDS_MS) + 1), sum_us=0)


def quiet_class(priority_class: PriorityClass, **changes: Any) -> ClassSnapshot:
    quiet = ClassSnapshot(
        priority_class=priority_class,
        num_waiting=0,
        num_running=0,
        num_suspended=0,
        waiting_gpu_us=0,
        estimated_start_q50_us=0,
        estimated_start_q90_us=0,
        closed=False,
        retry_after_us=None,
        prompt_tokens=0,
        output_tokens=0,
        queue_wait=NO_TIME,
        ttft=NO_TIME,
        preemptions=(),
        shed=(),
    )
    return replace(quiet, **changes)


def quiet_load(**changes: Any) -> LoadSnapshot:
    """Of a worker that is ready and has nothing to do."""
    quiet = LoadSnapshot(
        worker_id="worker-1",
        epoch=1,
        model="simulated",
        ready=True,
        draining=False,
        max_model_len=2_048,
        last_step_age_us=0,
        step=1,
        num_blocks=100,
        num_free_blocks=100,
        num_host_blocks=0,
        num_free_host_blocks=0,
        num_slots=8,
        num_free_slots=8,
        policy_version=1,
        prompt_tokens_total=0,
        output_tokens_total=0,
        busy_us_total=0,
        classes=tuple(map(quiet_class, PriorityClass)),
    )
    return replace(quiet, **changes)
