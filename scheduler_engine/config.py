"""The device as the engine sees it: how many blocks, slots and tokens there are. Fixed while the engine lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one worker. Always: every field positive, except ``num_host_blocks`` and ``copy_fence_steps`` which may be 0.

    ``copies_in_order``: the executor finishes a step's copies before its forward, so a block that is swapped out may be
    written again in the same step. When False a block stays fenced until a StepResult names its copy as completed.
    """

    num_blocks: int
    num_host_blocks: int
    num_slots: int
    max_model_len: int
    block_size: int = 16
    bytes_per_block: int = 2_097_152
    copies_in_order: bool = True
