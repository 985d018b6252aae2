"""The real engine over the real executor, on a clock that moves by each step's own length."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpu_worker.device.host_copies import HostCopies
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.events import Finished, Preempted
from scheduler_engine.plan import BlockCopy, StepPlan
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, cpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.kernels.test_host_copies import LateStream, NowStream
from wire.messages import SamplingParameters

NUM_TOKENS = 24
SPOILED = 1e4  # finite, as every number of a pool must be, and far from any that a model writes
GREEDY = SamplingParameters(temperature=0.0)
COST = CostConstants(
    base_ns=2_000_000,
    prefill_token_ns=50_000,
    prefill_context_ns=0,
    decode_row_ns=100_000,
    kv_token_ns=100,
    copy_operation_us=1,
    copy_bytes_per_us=5_000,
)


def on_late_streams(executor: ModelExecutor, num_staged: int) -> None:
    """From now on copies are as late as they may be: each happens when somebody waits for it, as on a slow bus."""
    plain: Any = executor.cache._copies
    executor.cache._copies = HostCopies(
        plain._pool,
        plain._host_pool,
        executor._runner.model.target.kernels,
        num_slots=num_staged,
        compute=NowStream(),
        out=LateStream(),
        into=LateStream(),
    )


class ComparedCopies:
    """Copies of another kind, and a look at each block that comes back. Always: it has the bits that it left with."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.num_compared = 0
        self._pool = executor.cache.device_pool
        self._copies = executor.cache._copies
        self._left: dict[int, torch.Tensor] = {}
        executor.cache._copies = self

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        self._left.update((copy.host_block, self._pool[copy.device_block].clone()) for copy in copies)
        self._copies.swap_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        self._copies.swap_in(copies)
        for copy in copies:
            assert torch.equal(self._pool[copy.device_block], self._left[copy.host_block]), copy
        self.num_compared += len(copies)

    def finish(self) -> None:
        self._copies.finish()


class Asked(NamedTuple):
    """One request, as a house and a driver are both told of it."""

    prompt: Sequence[int]
    rank: PriorityClass = PriorityClass.BATCH
    sampling: SamplingParameters = GREEDY
    num_tokens: int = NUM_TOKENS


def must_say_what_each_says_alone(house: House, drive: Any, asked: Mapping[str, Asked]) -> None:
    """What a request said, all of it or until it was cancelled, it says alone too; and the house is empty."""
    house.must_be_empty()
    alone = drive(house.executor)
    for name, one in asked.items():
        said = house.tokens[name]
        if house.ends[name].reason.value != "cancelled":
            assert len(said) == one.num_tokens, name
        expected = alone.run(alone.add(name, one.prompt, one.sampling), len(said)) if said else []
        assert said == expected, name
        house.executor.forget(RequestId(name))


class House:
    """Always: books are checked after every step, and what is free, on the device and on the host, is spoiled; a block
    that is known by a key holds what it held when it was first known by it. ``tokens`` holds what each request said,
    ``preempted`` who gave way in which step, ``levers`` how, ``ends`` how each ended.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        num_blocks: int,
        num_host_blocks: int,
        num_slots: int,
        step_us: int | None = None,
        cost: CostConstants = COST,
        **every_class: Any,
    ) -> None:
        """With ``step_us`` every step is said to take that long, so that plans do not depend on this machine.

        ``every_class``: fields of the policy of all classes.
        """
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
        first, second, third = (dataclasses.replace(row, **every_class) for row in cpu_classes())
        self.engine = Scheduler(
            config, PolicySnapshot(version=1, classes=(first, second, third), tenants=tenants), cost
        )
        self.executor = executor
        self._step_us = step_us
        self.now_us = 0
        self.num_steps = 0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}
        self.preempted: list[tuple[int, Preempted]] = []
        self.levers: Counter[str] = Counter()
        self.num_reused_at_once = 0  # blocks copied out and written by somebody else in the same step
        self._contents: dict[bytes, torch.Tensor] = {}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        rank: PriorityClass,
        sampling: SamplingParameters,
        *,
        max_tokens: int = NUM_TOKENS,
        tenant: str = "",
        **fields: Any,
    ) -> None:
        self.tokens[name] = []
        request = Request(
            request_id=RequestId(name),
            tenant_id=tenant or ("aurora" if rank is PriorityClass.INTERACTIVE else "bulk"),
            priority_class=rank,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            **fields,
        )
        self.engine.submit(request, self.now_us)

    def ask(self, name: str, asked: Asked, **fields: Any) -> None:
        self.submit(name, asked.prompt, asked.rank, asked.sampling, max_tokens=asked.num_tokens, **fields)

    def step(self) -> None:
        plan = self.engine.plan_step(self.now_us)
        result = self.executor.execute(plan)
        assert result.failed == ()
        self._note_reuse(plan)
        if self._step_us is not None:
            result = dataclasses.replace(result, duration_us=self._step_us)
        self.now_us += max(result.duration_us, 1_000)
        events = self.engine.apply_step(result, self.now_us)
        self.engine.check_books()
        assert events.rejected == ()
        self.preempted += [(self.num_steps, preempted) for preempted in events.preempted]
        self.levers.update(preempted.lever.value for preempted in events.preempted)
        columns = events.tokens
        for name, index, token_id in zip(columns.request_ids, columns.indexes, columns.token_ids, strict=True):
            assert index == len(self.tokens[name])
            self.tokens[name].append(token_id)
        for end in events.finished:
            self.executor.forget(end.request_id)
            self.ends[end.request_id] = end
        self.num_steps += 1
        self._look_at_blocks()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def run_until_said(self, name: str, num_tokens: int) -> None:
        while len(self.tokens[name]) < num_tokens:
            self.step()

    def must_be_empty(self) -> None:
        """All has come back: blocks on both sides, slots, and what the executor keeps for a request."""
        load = self.engine.load(self.now_us)
        assert (load.num_free_blocks, load.num_free_host_blocks) == (load.num_blocks, load.num_host_blocks)
        assert load.num_free_slots == load.num_slots
        assert not self.executor._stream_of
        assert not self.executor._failed_before

    def _note_reuse(self, plan: StepPlan) -> None:
        left = {copy.device_block: copy.request_id for copy in plan.swap_out}
        for row in plan.rows:
            written = row.block_table[row.start // 16 :]
            self.num_reused_at_once += sum(left.get(block, row.request_id) != row.request_id for block in written)

    def _look_at_blocks(self) -> None:
        state = self.engine._state
        pool, cache = self.executor.cache.device_pool, self.executor.cache
        for block in state.device._free:
            pool[block] = SPOILED
        for block in state.host._free:
            host_pool_of(cache)[block] = SPOILED
        for key, block in state.device._block_of.items():
            known = self._contents.setdefault(key, pool[block].clone())
            assert torch.allclose(pool[block], known, atol=1e-4), f"{key!r} is not what it was"


def host_pool_of(cache: Any) -> torch.Tensor:
    copies = cache._copies
    while not hasattr(copies, "_host_pool"):
        copies = copies._copies
    pool: torch.Tensor = copies._host_pool
    return pool
