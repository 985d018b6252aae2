"""The seam between the loop and a device.

An executor never changes a plan. On out-of-memory, NaN or a kernel error it reports which requests failed and leaves
the rest intact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.request import RequestId


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """What the engine must know of a device to plan for it; becomes an EngineConfig."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    copies_in_order: bool


class Executor(Protocol):
    shape: ExecutorShape

    def execute(self, plan: StepPlan) -> StepResult:
        """swap_out, swap_in, then one forward. Blocks until done; ``duration_us`` is what it took."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """The request has ended: drop per-request state (sampling streams). Its blocks are the engine's business."""
        ...

    def close(self) -> None: ...
