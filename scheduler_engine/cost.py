"""What a step and a copy cost: constants of a device, and (later in this module) their online fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """Additive model of a device, all integers, nanoseconds unless said.

    step = base + prefill_token * n + prefill_context * sum(n_i * context_i) + decode_row * rows + kv_token * tokens attended
    copy = copy_operation per block + bytes / copy_bytes_per_us   (design: docs/scheduling.md, cost model)
    """

    base_ns: int
    prefill_token_ns: int
    prefill_context_ns: int  # per (new token x token of context); may be 0
    decode_row_ns: int
    kv_token_ns: int
    copy_operation_us: int
    copy_bytes_per_us: int

    def step_us(self, *, prefill_tokens: int, prefill_context: int, decode_rows: int, kv_tokens: int) -> int:
        """Length of one step in microseconds, rounded up, without copies."""
        total_ns = (
            self.base_ns
            + self.prefill_token_ns * prefill_tokens
            + self.prefill_context_ns * prefill_context
            + self.decode_row_ns * decode_rows
            + self.kv_token_ns * kv_tokens
        )
        return -(-total_ns // 1_000)

    def copy_us(self, *, num_blocks: int, bytes_per_block: int) -> int:
        """Length of copying whole blocks one way, in microseconds."""
        if not num_blocks:
            return 0
        return num_blocks * self.copy_operation_us + -(-num_blocks * bytes_per_block // self.copy_bytes_per_us)
