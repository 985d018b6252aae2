"""The device as the engine sees it: how many blocks, slots and tokens there are. Fixed while the engine lives."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_engine.errors import Misuse


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one worker. Always: every field positive, except ``num_host_blocks`` which may be 0.

    ``copies_in_order``: the executor finishes a step's copies before its forward, so a block that is swapped out may be
    written again in the same step. When False a block stays fenced until a StepResult names its copy as completed.
    ``max_waiting_per_class`` and ``_per_tenant`` (in a class) bound memory; waiting time is bounded by the policy.
    """

    num_blocks: int
    num_host_blocks: int
    num_slots: int
    max_model_len: int
    block_size: int = 16
    bytes_per_block: int = 2_097_152
    copies_in_order: bool = True
    max_waiting_per_class: int = 200_000
    max_waiting_per_tenant: int = 100_000

    def __post_init__(self) -> None:
        for name in ("num_blocks", "num_slots", "max_model_len", "block_size", "bytes_per_block"):
            if getattr(self, name) <= 0:
                raise Misuse(f"EngineConfig.{name} must be positive, not {getattr(self, name)}")
        if self.num_host_blocks < 0:
            raise Misuse(f"EngineConfig.num_host_blocks must be 0 or more, not {self.num_host_blocks}")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)
