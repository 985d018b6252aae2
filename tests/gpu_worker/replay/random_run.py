"""A long random run on a small, slow, noisy device: what the replay tests record. Everything comes from one seed."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable

from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, gpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler

CONFIG = EngineConfig(num_blocks=96, num_host_blocks=64, num_slots=8, max_model_len=4_096, copies_in_order=False)
COST = CostConstants(
    base_ns=6_000_000,
    prefill_token_ns=45_000,
    prefill_context_ns=0,
    decode_row_ns=30_000,
    kv_token_ns=65,
    copy_operation_us=5,
    copy_bytes_per_us=50_000,
)
POLICY = PolicySnapshot(version=1, classes=gpu_classes())
TENANTS = ("Aurora", "Bulk", "Nova")


class RandomRun:
    """Arrivals, cancels, failures, stops, slow copies and noisy steps. Always: the same seed gives the same calls."""

    def __init__(
        self,
        engine: Scheduler,
        seed: int,
        *,
        noise_percent: int = 20,
        with_stops: bool = True,
        arrivals_percent: float = 6,
        names: str = "r",
    ) -> None:
        self.engine = engine
        self.now_us = 1_000_000
        self._random = random.Random(seed)
        self._noise_percent = noise_percent
        self._names = names
        self._arrivals = arrivals_percent / 100  # a step, and as often another one after each
        self._stop_token_ids = (7,) if with_stops else ()
        self._num_requests = self._num_answer_blocks = 0
        self._open: list[RequestId] = []
        self._elsewhere_us: Counter[tuple[PriorityClass, str]] = Counter()
        self._copies: list[tuple[int, RequestId]] = []

    def run(self, num_steps: int, after_step: Callable[[int], None] = lambda step: None) -> None:
        for step in range(num_steps):
            self._arrive()
            self._step(step)
            after_step(step)

    def _arrive(self) -> None:
        rng = self._random
        while rng.random() < self._arrivals:
            self._num_requests += 1
            prompt_len = rng.randint(1, 400)
            request = Request(
                request_id=RequestId(f"{self._names}{self._num_requests}"),
                tenant_id=rng.choice(TENANTS),
                priority_class=PriorityClass(rng.randrange(3)),
                prompt_token_ids=range(prompt_len),
                max_tokens=rng.randint(1, 150),
                stop_token_ids=self._stop_token_ids,
                reproducible=rng.random() < 0.1,
                prefix_keys=self._prefix_keys(prompt_len),
                max_queue_wait_us=rng.choice((None, None, 200_000, 2_000_000)),
                hard_deadline_us=rng.choice((None, None, None, 500_000)),
            )
            self._open.append(request.request_id)
            self.engine.submit(request, self.now_us - rng.randrange(5_000))
        if rng.random() < 0.02:
            key = (PriorityClass(rng.randrange(3)), rng.choice(TENANTS))
            self._elsewhere_us[key] += rng.randrange(10**6)
            self.engine.set_service_elsewhere(*key, self._elsewhere_us[key])
        if self._open and rng.random() < 0.005:
            self.engine.cancel(rng.choice(self._open), "client", self.now_us)

    def _prefix_keys(self, prompt_len: int) -> tuple[bytes, ...]:
        """Half of the prompts begin as one of four others do, for some blocks."""
        rng, num_blocks = self._random, prompt_len // CONFIG.block_size
        num_shared = rng.randint(0, num_blocks) if rng.random() < 0.5 else 0
        family = rng.randrange(4)
        shared = [f"family {family}, block {i}".encode() for i in range(num_shared)]
        return (*shared, *(f"request {self._num_requests}, block {i}".encode() for i in range(num_shared, num_blocks)))

    def _step(self, step: int) -> None:
        rng, plan = self._random, self.engine.plan_step(self.now_us)
        failed = tuple(
            RowFailure(row.request_id, "not_finite", rng.random() < 0.2) for row in plan.rows if rng.random() < 0.0005
        )
        bad = {failure.request_id for failure in failed}
        sampled = [
            -1 if not row.samples or row.request_id in bad else rng.choice((7, 8, 9)) if rng.random() < 0.02 else 9
            for row in plan.rows
        ]
        duration_us = self._duration_us(plan)
        self.now_us += (duration_us or 2_000) + rng.randrange(50)
        result = StepResult(plan.step, duration_us, sampled, failed=failed, completed_copies=self._copied(plan, step))
        events = self.engine.apply_step(result, self.now_us)
        for request_id in events.filled:
            self._num_answer_blocks += 1
            self.engine.name_blocks(request_id, (f"answer block {self._num_answer_blocks}".encode(),))
        ended = {end.request_id for end in (*events.finished, *events.rejected)}
        if ended:
            self._open = [name for name in self._open if name not in ended]
        self.now_us += rng.randrange(20)

    def _duration_us(self, plan: StepPlan) -> int:
        if plan.is_empty:
            return 0
        rows_ns = sum(COST.row_ns(row.start, len(row.token_ids)) for row in plan.rows)
        copies_ns = COST.copy_ns(len(plan.swap_out) + len(plan.swap_in), CONFIG.bytes_per_block)
        duration_us = (COST.base_ns + rows_ns + copies_ns) // 1_000
        return duration_us * (100 + self._random.randint(-self._noise_percent, self._noise_percent)) // 100

    def _copied(self, plan: StepPlan, step: int) -> tuple[RequestId, ...]:
        if self.engine.config.copies_in_order:
            return ()
        starting = dict.fromkeys(copy.request_id for copy in plan.swap_out)
        self._copies += [(step + self._random.randrange(3), request_id) for request_id in starting]
        done = tuple(request_id for due, request_id in self._copies if due <= step)
        self._copies = [copy for copy in self._copies if copy[0] > step]
        return done


def digest_of(seed: int, num_steps: int) -> str:
    engine = Scheduler(CONFIG, POLICY, COST)
    RandomRun(engine, seed).run(num_steps)
    return engine.digest


if __name__ == "__main__":
    sys.stdout.write(digest_of(int(sys.argv[1]), int(sys.argv[2])))
