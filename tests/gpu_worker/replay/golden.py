"""The golden traces: logs that lie in the tree, and the runs that they were recorded from.

``python -m tests.gpu_worker.replay.golden`` records them anew. Do it when decisions change on purpose, and say why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gpu_worker.replay.log_writer import LogWriter
from gpu_worker.replay.recording import Origin, RecordingScheduler
from scheduler_engine.config import EngineConfig
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.replay.random_run import CONFIG, COST, POLICY, RandomRun

FOLDER = Path(__file__).parent / "golden"
NUM_STEPS = 1_500
CELLS = (
    TenantClassPolicy(tenant_id="Nova", priority_class=PriorityClass.DEFAULT, weight=3, concurrency=2),
    TenantClassPolicy(tenant_id="Bulk", priority_class=PriorityClass.BATCH, hard_deadline_ms=5_000),
)


def _edited(engine: Scheduler, run: RandomRun) -> None:
    """A policy that changes in the middle, and a drain at the end."""
    run.run(NUM_STEPS // 2)
    engine.set_policy(replace(POLICY, version=2, tenants=CELLS))
    run.run(NUM_STEPS // 2)
    engine.drain()
    run.run(100)


class Trace(NamedTuple):
    """What is recorded under one name."""

    seed: int
    config: EngineConfig
    tell: Callable[[Scheduler, RandomRun], None]


def _plain(engine: Scheduler, run: RandomRun) -> None:
    run.run(NUM_STEPS)


TRACES = {
    "slow_copies": Trace(1, CONFIG, _plain),
    "copies_in_order": Trace(2, replace(CONFIG, copies_in_order=True), _plain),
    "no_host_memory": Trace(3, replace(CONFIG, num_host_blocks=0), _plain),
    "edited_policy": Trace(4, CONFIG, _edited),
}


def record(name: str, folder: Path) -> Path:
    """The log of one trace, under its name."""
    seed, config, tell = TRACES[name]
    writer = LogWriter(folder / name, 1 << 30, lambda: 0.0, may_wait=True)
    engine = RecordingScheduler(
        config,
        POLICY,
        COST,
        origin=Origin(worker_id="golden", epoch=1, model=name),
        writer=writer,
        most_file_bytes=1 << 30,
        unix_s=lambda: 0.0,
    )
    tell(engine, RandomRun(engine, seed))
    engine.close()
    writer.close()
    (written,) = (folder / name).iterdir()
    path = written.rename(folder / f"{name}.rlog")
    (folder / name).rmdir()
    return path


if __name__ == "__main__":
    for each in TRACES:
        sys.stdout.write(f"{record(each, FOLDER)}\n")
