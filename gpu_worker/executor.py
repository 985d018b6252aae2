"""The seam between the loop and a device.

An executor never changes a plan. On out-of-memory, NaN or a kernel error it reports which requests failed and leaves
the rest intact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.request import RequestId
from wire.messages import SamplingParameters


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """What the engine must know of a device to plan for it; becomes an EngineConfig."""

    num_blocks: int
    num_host_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    copies_in_order: bool


class DeviceLost(Exception):
    """The device answers nobody any more: the worker must end, so that its requests are taken up elsewhere."""


class ConstraintError(Exception):
    """The grammar cannot say what may come next; its request must end."""


class Constraint(Protocol):
    """A grammar while it watches one sequence."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """Which tokens may follow the output: one bit per token id, least significant first.

        Called from one thread at a time, with an output that only grows. Raises ConstraintError.
        """
        ...


@dataclass(frozen=True, slots=True)
class DrawRules:
    """How a request's next tokens are drawn: what ``Request.sampling`` carries through the engine to the executor."""

    parameters: SamplingParameters
    prompt_token_ids: Sequence[int] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    constraint: Constraint | None = None


class Executor(Protocol):
    shape: ExecutorShape

    def execute(self, plan: StepPlan) -> StepResult:
        """swap_out, swap_in, then one forward. Blocks until done; ``duration_us`` is what it took.

        Raises DeviceLost.
        """
        ...

    def forget(self, request_id: RequestId) -> None:
        """The request has ended: drop per-request state (sampling streams). Its blocks are the engine's business."""
        ...

    def close(self) -> None: ...
