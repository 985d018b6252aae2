"""The real engine over the real executor, on a clock that moves by each step's own length."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from gpu_worker.model_executor import ModelExecutor
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, cpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler
from wire.messages import SamplingParameters

NUM_TOKENS = 24
COST = CostConstants(
    base_ns=2_000_000,
    prefill_token_ns=50_000,
    prefill_context_ns=0,
    decode_row_ns=100_000,
    kv_token_ns=100,
    copy_operation_us=1,
    copy_bytes_per_us=5_000,
)


class House:
    """Always: books are checked after every step, ``tokens`` holds what each request said, ``levers`` who gave way."""

    def __init__(
        self,
        executor: ModelExecutor,
        num_blocks: int,
        num_host_blocks: int,
        num_slots: int,
        step_us: int | None = None,
    ) -> None:
        """With ``step_us`` every step is said to take that long, so that plans do not depend on this machine."""
        shape = executor.shape
        config = EngineConfig(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            bytes_per_block=shape.bytes_per_block,
        )
        tenants = tuple(
            TenantClassPolicy(tenant_id=tenant, priority_class=rank)
            for tenant in ("aurora", "bulk")
            for rank in PriorityClass
        )
        self.engine = Scheduler(config, PolicySnapshot(version=1, classes=cpu_classes(), tenants=tenants), COST)
        self.executor = executor
        self._step_us = step_us
        self.now_us = 0
        self.tokens: dict[str, list[int]] = {}
        self.levers: Counter[str] = Counter()

    def submit(self, name: str, prompt: Sequence[int], rank: PriorityClass, sampling: SamplingParameters) -> None:
        self.tokens[name] = []
        request = Request(
            request_id=RequestId(name),
            tenant_id="aurora" if rank is PriorityClass.INTERACTIVE else "bulk",
            priority_class=rank,
            prompt_token_ids=prompt,
            max_tokens=NUM_TOKENS,
            sampling=sampling,
        )
        self.engine.submit(request, self.now_us)

    def step(self) -> None:
        plan = self.engine.plan_step(self.now_us)
        result = self.executor.execute(plan)
        assert result.failed == ()
        if self._step_us is not None:
            result = dataclasses.replace(result, duration_us=self._step_us)
        self.now_us += max(result.duration_us, 1_000)
        events = self.engine.apply_step(result, self.now_us)
        self.engine.check_books()
        self.levers.update(preempted.lever.value for preempted in events.preempted)
        columns = events.tokens
        for name, index, token_id in zip(columns.request_ids, columns.indexes, columns.token_ids, strict=True):
            assert index == len(self.tokens[name])
            self.tokens[name].append(token_id)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
