"""Ten thousand requests on one worker, cancelled, preempted and failed at random: it grows by nothing that matters."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import Cancel, SamplingParameters

pytestmark = pytest.mark.soak

NUM_REQUESTS = 10_000
NUM_PARTS = 9  # that the memory is looked at in
NUM_BLOCKS = 56  # too few for twelve at once
NUM_WARM_UP = 1_000  # until then the pools' pages are written for the first time, and shapes of steps compiled
GREEDY, SEEDED = SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.8, seed=3)


class Failing:
    """The model executor, with rows that fail now and then. Always: the others of the step are as computed."""

    def __init__(self, executor: ModelExecutor, chance: random.Random) -> None:
        self.shape = executor.shape
        self.num_failed = 0
        self._executor = executor
        self._chance = chance

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._executor.execute(plan)
        if not plan.num_rows or self._chance.random() > 0.005:
            return result
        place = self._chance.randrange(plan.num_rows)
        row = plan.rows[place]
        self.num_failed += 1
        sampled = list(result.sampled_token_ids)
        sampled[place] = -1
        failure = RowFailure(row.request_id, "kernel_error", poison=self._chance.random() < 0.2)
        return StepResult(result.step, result.duration_us, sampled, failed=(failure,))

    def forget(self, request_id: RequestId) -> None:
        self._executor.forget(request_id)

    def close(self) -> None:
        self._executor.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a crowd's prompts and answers, in tokens. ``shared``: of beginnings that some have in common."""

    shared: Sequence[int]
    own: int
    output: int


class Crowd:
    """Always: at most forty requests under way, from three tenants of three classes; one in eight is cancelled."""

    def __init__(self, made: ModelWorker, chance: random.Random, lengths: Lengths) -> None:
        self._made, self._chance, self._lengths = made, chance, lengths
        self._num_asked = 0
        self._open: list[str] = []
        self.num_ended = 0

    def serve(self, count: int) -> None:
        """Until ``count`` more have come and all have gone."""
        last = self._num_asked + count
        while self._num_asked < last or self._made.loop.has_work:
            while self._num_asked < last and len(self._open) < 40:
                self._ask()
            if self._open and self._chance.random() < 0.06:
                name = self._chance.choice(self._open)
                self._made.take_in(Cancel(response_id=name, attempt=1, reason="client"))
            self._made.turn()
            self._open = [name for name in self._open if name not in self._made.ends]
            self._forget()

    def _ask(self) -> None:
        chance, number = self._chance, self._num_asked
        self._num_asked += 1
        tenant, rank = chance.choice((("aurora", 0), ("nova", 1), ("bulk", 2), ("bulk", 2)))
        shared = [(number % 4 * 31 + place) % 259 for place in range(chance.choice(self._lengths.shared))]
        own = [chance.randrange(259) for _ in range(chance.randint(1, self._lengths.own))]
        self._made.submit(
            f"r{number}",
            (*shared, *own),
            tenant_id=tenant,
            cache_salt=tenant,
            priority_class=PriorityClass(rank),
            max_tokens=chance.randint(1, self._lengths.output),
            sampling=SEEDED if number % 2 else GREEDY,
        )
        self._open.append(f"r{number}")

    def _forget(self) -> None:
        """What the test itself remembers must not grow either."""
        made = self._made
        self.num_ended += len(made.ends)
        for name in made.ends:
            made.usages.pop(name, None)
            made.tokens.pop((name, 0), None)
            made.logprobs.pop((name, 0), None)
        made.ends.clear()


def test_ten_thousand_requests_leave_no_block_and_no_memory_behind(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=4, threads=1)
    said = serve_ten_thousand(executor, Lengths(shared=(0, 20, 60), own=30, output=12))
    with capsys.disabled():
        sys.stdout.write(said)


def test_ten_thousand_requests_to_smollm2_leave_no_block_and_no_memory_behind(
    demo_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    executor = build(demo_model_path, kv_mib=40, host_kv_mib=40, threads=1)
    said = serve_ten_thousand(executor, Lengths(shared=(0, 0, 20, 40), own=12, output=4))
    with capsys.disabled():
        sys.stdout.write(said)


def serve_ten_thousand(served: ModelExecutor, lengths: Lengths) -> str:
    """A line of what happened."""
    chance = random.Random(7)
    executor: Any = Failing(served, chance)
    made = ModelWorker(executor, num_slots=12, num_blocks=NUM_BLOCKS, prefix_keys=PrefixKeys(b"secret" * 5, 16))
    sizes = []
    crowd = Crowd(made, chance, lengths)
    crowd.serve(NUM_WARM_UP)
    before = resident_bytes()
    for _ in range(NUM_PARTS):
        crowd.serve((NUM_REQUESTS - NUM_WARM_UP) // NUM_PARTS)
        sizes.append(resident_bytes())
    growth = (sizes[-1] - before) / before
    snapshot = made.loop.snapshot()
    pushed = sum(count for row in snapshot.classes for _, _, count in row.preemptions)
    assert crowd.num_ended == NUM_REQUESTS
    assert executor.num_failed > 10
    assert pushed > 100
    assert snapshot.num_free_blocks == snapshot.num_blocks
    assert snapshot.num_free_host_blocks == snapshot.num_host_blocks
    said = (
        f"\n{crowd.num_ended} ended, {executor.num_failed} rows failed, {pushed} preempted, "
        f"{before >> 20} MiB then {[size >> 20 for size in sizes]}, growth {growth:.1%}\n"
    )
    assert growth <= 0.05, said
    return said
