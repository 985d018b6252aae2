"""A whole model on a device: decode and prefill against the roofline, swaps, what a preemption waits for.

Knows the executor and made-up plans; the flood with a scheduler is in ``gpu_flood``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.device import Ceilings, DeviceWeights, Machine
from gpu_worker.device.building import assemble
from gpu_worker.device.calibration import warm_up
from gpu_worker.device.cuda_device import GraphCapture
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.kernels.compiled import TritonKernels
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.batch import pool_shape
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama import Llama
from gpu_worker.models.random_weights import TINY
from gpu_worker.models.target import Target, plain_linear
from scheduler_engine.plan import BlockCopy, ScheduledRow, StepPlan
from scheduler_engine.request import RequestId

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_epsilon=1e-5,
    rope_theta=500_000.0,
    context_length=8_192,
    tied_embeddings=False,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of everything measured on the model. ``decodes``: (rows, context)."""

    config: ModelConfig
    kv_mib: int | None
    host_kv_mib: int
    graph_sizes: Sequence[int] | None  # None: those that serving captures
    decodes: Sequence[tuple[int, int]]
    prefill: int
    swap_blocks: int
    victim_tokens: int
    steps: int


FULL = Plan(LLAMA_8B, 48 << 10, 8 << 10, None, ((1, 2_048), (64, 2_048), (256, 1_024)), 2_048, 1_024, 4_096, 12)
REHEARSAL = Plan(TINY, 1, 1, (1, 2), ((1, 20), (2, 20)), 20, 3, 40, 1)


def build(machine: Machine, plan: Plan) -> ModelExecutor:
    """Random weights, pools, tuned kernels, captured decodes; a CPU's capture is the forward itself."""
    kernels = TritonKernels(pool_shape(plan.config, BLOCK_SIZE), machine.device)
    target = Target(machine.device, machine.dtype, kernels, plain_linear)
    executor = assemble(
        Llama(DeviceWeights(plan.config, machine), target), kv_mib=plan.kv_mib, host_kv_mib=plan.host_kv_mib
    )
    if machine.is_gpu:
        warm_up(executor.execute, executor.shape)
    capture: Any = GraphCapture() if machine.is_gpu else lambda forward: forward
    executor.capture_decodes(capture, plan.graph_sizes)
    return executor


class OnModel:
    """Made-up steps on one executor. Always: the pool belongs to nobody between two measurements."""

    def __init__(self, executor: ModelExecutor, machine: Machine, limits: Ceilings, plan: Plan) -> None:
        self._executor, self._machine, self._limits, self._plan = executor, machine, limits, plan
        config = plan.config
        heads = config.num_heads + 2 * config.num_kv_heads
        per_layer = config.hidden_size * (
            heads * config.head_dim + config.num_heads * config.head_dim + 3 * config.intermediate_size
        )
        self._weights = config.num_layers * per_layer
        self._head = config.vocab_size * config.hidden_size
        self._kv_token_bytes = executor.shape.bytes_per_block // BLOCK_SIZE

    def all(self) -> dict[str, Any]:
        return {
            "decode": {f"{rows} x {context}": self.decode(rows, context) for rows, context in self._plan.decodes},
            "prefill": self.prefill(self._plan.prefill),
            "swap": self.swap(self._plan.swap_blocks),
            "preemption": self.preemption(self._plan.victim_tokens),
        }

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        """A whole step as the worker does it, sampling and its way back to the host included."""
        blocks = -(-context // BLOCK_SIZE)
        step = self._step(
            [self._row(str(row), 1, context - 1, range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        )
        seconds = self._wall(step)
        num_bytes = (self._weights + self._head) * self._machine.dtype.itemsize + rows * context * self._kv_token_bytes
        floor_s = self._limits.floor_s(num_bytes, 2 * rows * (self._weights + self._head))
        return {
            "ms": round(seconds * 1e3, 3),
            "floor_ms": round(floor_s * 1e3, 3),
            "over_floor": round(seconds / floor_s, 2),
            "tokens_per_s": round(rows / seconds),
        }

    def prefill(self, tokens: int) -> dict[str, Any]:
        config = self._plan.config
        seconds = self._wall(self._step([self._row("chunk", tokens, 0, range(-(-tokens // BLOCK_SIZE)))]))
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
        rate = (2 * tokens * self._weights + attention) / seconds
        return {
            "tokens": tokens,
            "ms": round(seconds * 1e3, 2),
            "tokens_per_s": round(tokens / seconds),
            "of_matmul_rate": round(rate / self._limits.operations_per_s, 3),
        }

    def swap(self, num_blocks: int) -> dict[str, Any]:
        """Bandwidth both ways, of blocks that lie scattered in both pools."""
        copies, moved = self._copies(num_blocks), num_blocks * self._executor.shape.bytes_per_block
        found = {"mib": moved >> 20}
        for name, move in (("out", self._executor.cache.swap_out), ("in", self._executor.cache.swap_in)):
            seconds = self._wall(lambda move=move: self._moved(move, copies))  # type: ignore[misc]
            found[f"{name}_gb_per_s"] = round(moved / seconds / 1e9, 2)
        return found

    def preemption(self, tokens: int) -> dict[str, Any]:
        """From the decision until the victim's blocks may be written: all of it sent now, or all but its last block."""
        blocks = -(-tokens // BLOCK_SIZE)
        copies = self._copies(blocks)
        found: dict[str, Any] = {"victim_tokens": tokens, "blocks": blocks}
        for name, now in (("whole", copies), ("checkpointed", copies[-1:])):
            usable = self._wall(lambda now=now: self._executor.cache.swap_out(now))  # type: ignore[misc]
            self._executor.cache.finish_copies()
            arrived = self._wall(lambda now=now: self._moved(self._executor.cache.swap_out, now))  # type: ignore[misc]
            found[name] = {"usable_ms": round(usable * 1e3, 3), "on_the_host_ms": round(arrived * 1e3, 3)}
        return found

    def _moved(self, move: Callable[[Sequence[BlockCopy]], None], copies: Sequence[BlockCopy]) -> None:
        move(copies)
        self._executor.cache.finish_copies()

    def _copies(self, num_blocks: int) -> list[BlockCopy]:
        random = torch.Generator().manual_seed(0)
        shape = self._executor.shape
        count = min(num_blocks, shape.num_blocks, shape.num_host_blocks)
        device = torch.randperm(shape.num_blocks, generator=random)[:count].tolist()
        host = torch.randperm(shape.num_host_blocks, generator=random)[:count].tolist()
        return [BlockCopy(RequestId("victim"), *pair) for pair in zip(device, host, strict=True)]

    def _row(self, name: str, new: int, start: int, table: Sequence[int]) -> ScheduledRow:
        fitting = [block % self._executor.shape.num_blocks for block in table]
        return ScheduledRow(RequestId(name), [1] * new, start, fitting, True, (), None)

    def _step(self, rows: Sequence[ScheduledRow]) -> Callable[[], object]:
        plan = StepPlan(step=0, chunks=tuple(rows), swap_out=(), swap_in=(), token_budget=0, wake_at_us=None)

        def step() -> None:
            failed = self._executor.execute(plan).failed
            if failed:
                raise RuntimeError(f"a made-up row failed: {failed[0].reason}")

        return step

    def _wall(self, work: Callable[[], object]) -> float:
        """Median seconds until the computation is idle again, by the host's clock: what a scheduler would see."""
        durations = []
        for _ in range(self._plan.steps + 1):
            self._machine.settle()
            started_ns = time.perf_counter_ns()
            work()
            if self._machine.is_gpu:
                torch.cuda.current_stream().synchronize()
            durations.append((time.perf_counter_ns() - started_ns) / 1e9)
        kept = sorted(durations[1:])  # the first pays for what is made once
        return kept[len(kept) // 2]
