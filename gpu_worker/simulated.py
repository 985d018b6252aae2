"""A device made of a cost model: obeys every plan, takes the time the model says, and makes up tokens.

Token ids are a function of request and position alone, so a text does not depend on what the request went through.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpu_worker.clock import Clock
from gpu_worker.executor import ExecutorShape
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import ClassPolicy, cpu_classes, gpu_classes
from scheduler_engine.request import RequestId

BYTE_TOKENS = (*(bytes([byte]) for byte in range(256)), b"", b"", b"")  # a vocabulary of bytes and three control tokens


def readable_tokens(token_bytes: Sequence[bytes], stop_token_ids: Collection[int] = ()) -> tuple[int, ...]:
    """Ids whose bytes are letters and blanks: what a made-up text is made of."""
    return tuple(
        token_id
        for token_id, text in enumerate(token_bytes)
        if text.isascii() and text.replace(b" ", b"").isalpha() and token_id not in stop_token_ids
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device as a cost model, its pools, and the class parameters that fit its pace."""

    name: str
    shape: ExecutorShape
    num_slots: int
    cost: CostConstants
    classes: tuple[ClassPolicy, ClassPolicy, ClassPolicy]

    def engine_config(self) -> EngineConfig:
        return engine_config(self.shape, self.num_slots)


def engine_config(shape: ExecutorShape, num_slots: int) -> EngineConfig:
    """An executor's shape as the engine's configuration."""
    return EngineConfig(
        num_blocks=shape.num_blocks,
        num_host_blocks=shape.num_host_blocks,
        num_slots=num_slots,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        bytes_per_block=shape.bytes_per_block,
        copies_in_order=shape.copies_in_order,
    )


# Llama-3-8B in bf16: 131,072 bytes of KV a token; 141 GB less 16 GB of weights and working space. Step time: docs of
# the step model (6 ms + 45 us per prefill token + 30 us per decode row + 65 ns per token attended), copies at 50 GB/s.
_H200_8B = DeviceProfile(
    name="h200-8b",
    shape=ExecutorShape(
        num_blocks=50_000,
        num_host_blocks=32_768,
        block_size=16,
        bytes_per_block=2_097_152,
        max_model_len=8_192,
        copies_in_order=True,
    ),
    num_slots=256,
    cost=CostConstants(
        base_ns=6_000_000,
        prefill_token_ns=45_000,
        prefill_context_ns=0,
        decode_row_ns=30_000,
        kv_token_ns=65,
        copy_operation_us=5,
        copy_bytes_per_us=50_000,
    ),
    classes=gpu_classes(),
)
# SmolLM2-135M in fp32 on one core; 512 MiB of KV and 192 MiB for what is swapped out, so that a worker needs 1.6 GiB.
_CPU_SMOLLM2 = DeviceProfile(
    name="cpu-smollm2",
    shape=ExecutorShape(
        num_blocks=728,
        num_host_blocks=273,
        block_size=16,
        bytes_per_block=737_280,
        max_model_len=8_192,
        copies_in_order=True,
    ),
    num_slots=48,
    cost=CostConstants(
        base_ns=40_000_000,
        prefill_token_ns=2_700_000,
        prefill_context_ns=0,
        decode_row_ns=8_000_000,
        kv_token_ns=2_000,
        copy_operation_us=20,
        copy_bytes_per_us=4_000,
    ),
    classes=cpu_classes(),
)
# Small enough to fill by hand, quick enough to watch.
_TOY = DeviceProfile(
    name="toy",
    shape=ExecutorShape(
        num_blocks=256,
        num_host_blocks=512,
        block_size=16,
        bytes_per_block=65_536,
        max_model_len=2_048,
        copies_in_order=True,
    ),
    num_slots=8,
    cost=CostConstants(
        base_ns=6_000_000,
        prefill_token_ns=45_000,
        prefill_context_ns=0,
        decode_row_ns=30_000,
        kv_token_ns=65,
        copy_operation_us=5,
        copy_bytes_per_us=10_000,
    ),
    classes=gpu_classes(),
)
# Costs as little as the model allows: what is left of a request's time is the platform's own.
_INSTANT = replace(
    _TOY,
    name="instant",
    shape=replace(_TOY.shape, num_blocks=8_192),
    num_slots=256,
    cost=CostConstants(
        base_ns=1_000,
        prefill_token_ns=1,
        prefill_context_ns=0,
        decode_row_ns=1,
        kv_token_ns=1,
        copy_operation_us=1,
        copy_bytes_per_us=1_000_000,
    ),
)
DEVICES = {profile.name: profile for profile in (_H200_8B, _CPU_SMOLLM2, _TOY, _INSTANT)}


class SimulatedExecutor:
    """Always: no plan is changed, nothing fails, and a step takes ``scale`` times what the cost model says.

    ``noise_percent``: each step is lengthened or shortened by up to this much, from ``seed``.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        clock: Clock,
        *,
        alphabet: Sequence[int] | None = None,
        scale: float = 1.0,
        noise_percent: int = 0,
        seed: int = 0,
    ) -> None:
        self.shape = profile.shape
        self._cost = profile.cost
        self._clock = clock
        self._alphabet = tuple(alphabet or readable_tokens(BYTE_TOKENS))
        self._scale = scale
        self._noise_percent = noise_percent
        self._random = random.Random(seed)
        self._starts: dict[RequestId, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        duration_us = self._duration_us(plan)
        self._clock.sleep_us(duration_us)
        alphabet, num_letters, start = self._alphabet, len(self._alphabet), self._start
        decodes = zip(plan.decodes.request_ids, plan.decodes.num_outputs, strict=True)
        sampled = [alphabet[(start(request_id) + 7 * num) % num_letters] for request_id, num in decodes]
        sampled += [
            alphabet[(start(row.request_id) + 7 * len(row.output_ids)) % num_letters] if row.samples else -1
            for row in plan.chunks
        ]
        return StepResult(step=plan.step, duration_us=duration_us, sampled_token_ids=sampled)

    def _start(self, request_id: RequestId) -> int:
        start = self._starts.get(request_id)
        if start is None:
            start = self._starts[request_id] = zlib.crc32(request_id.encode())
        return start

    def _duration_us(self, plan: StepPlan) -> int:
        prefill_tokens = prefill_context = 0
        decode_rows, kv_tokens = len(plan.decodes), plan.decodes.num_attended
        for row in plan.chunks:
            num_tokens = len(row.token_ids)
            kv_tokens += row.start + num_tokens  # a chunk reads what it attends to once
            if num_tokens == 1:
                decode_rows += 1
            else:
                prefill_tokens += num_tokens
                prefill_context += num_tokens * row.start
        duration_us = self._cost.step_us(
            prefill_tokens=prefill_tokens,
            prefill_context=prefill_context,
            decode_rows=decode_rows,
            kv_tokens=kv_tokens,
        )
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        duration_us += self._cost.copy_us(num_blocks=num_copies, bytes_per_block=self.shape.bytes_per_block)
        if self._noise_percent:
            duration_us += duration_us * self._random.randint(-self._noise_percent, self._noise_percent) // 100
        return round(duration_us * self._scale)

    def forget(self, request_id: RequestId) -> None:
        self._starts.pop(request_id, None)

    def close(self) -> None:
        self._starts.clear()
