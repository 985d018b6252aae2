"""What a step and a copy cost: constants of a device, and their online correction.

Knows token counts and durations; refuses to know requests. Integers only, so that a replay fits the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """Additive model of a device, all integers, nanoseconds unless said.

    step = base + prefill_token * n + prefill_context * sum(n_i * context_i) + decode_row * rows
           + kv_token * tokens attended
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

    def row_ns(self, start: int, count: int) -> int:
        """One request's share of a step: ``count`` new tokens at positions ``[start, start + count)``."""
        if count == 1:
            return self.decode_row_ns + self.kv_token_ns * (start + 1)
        new_ns = self.prefill_token_ns + self.prefill_context_ns * start
        return new_ns * count + self.kv_token_ns * (start + count)

    def copy_ns(self, num_blocks: int, bytes_per_block: int) -> int:
        """``copy_us`` in nanoseconds."""
        return self.copy_us(num_blocks=num_blocks, bytes_per_block=bytes_per_block) * 1_000


_SCALE_ONE = 1_024
_SCALE_MIN = _SCALE_ONE // 32
_SCALE_MAX = _SCALE_ONE * 32


class FittedCost:
    """The constants, times how much slower the device has been of late. Always: 1/32 <= scale <= 32.

    One factor instead of one per constant: it follows a processor that changes its speed, cannot be led astray by steps
    that all look alike, and the shares inside a step come from calibration.
    """

    def __init__(self, constants: CostConstants, bytes_per_block: int) -> None:
        self.constants = constants
        self.bytes_per_block = bytes_per_block
        self.step_us = max(1, constants.base_ns // 1_000)  # moving average of step lengths
        self._scale = _SCALE_ONE

    def observe(self, nominal_ns: int, duration_us: int) -> None:
        """A step whose constants said ``nominal_ns`` took ``duration_us``: one eighth of the way towards it."""
        ratio = min(_SCALE_MAX, max(_SCALE_MIN, duration_us * 1_000 * _SCALE_ONE // max(1, nominal_ns)))
        self._scale += (ratio - self._scale) // 8
        self.step_us = max(1, self.step_us + (duration_us - self.step_us) // 8)

    def to_us(self, nominal_ns: int) -> int:
        """What ``nominal_ns`` will really take, rounded up."""
        return -(-nominal_ns * self._scale // (_SCALE_ONE * 1_000))

    def to_nominal_ns(self, duration_us: int) -> int:
        """How much nominal work fits into ``duration_us``."""
        return duration_us * 1_000 * _SCALE_ONE // self._scale

    def copy_ns(self, num_blocks: int) -> int:
        """Nominal cost of copying blocks one way."""
        return self.constants.copy_ns(num_blocks, self.bytes_per_block)

    def prefill_ns(self, start: int, count: int) -> int:
        """Nominal cost of computing positions ``[start, start + count)`` in one go, without the step's base."""
        if count == 0:
            return 0
        constants = self.constants
        context = constants.prefill_context_ns * count * (start + count // 2)
        return constants.prefill_token_ns * count + context + constants.kv_token_ns * (start + count)

    def request_ns(self, *, start: int, prefill: int, output: int) -> int:
        """Nominal cost of a whole request from ``start``: its prefill, then ``output`` decode rows over a growing
        context.
        """
        constants = self.constants
        middle = start + prefill + output // 2
        return self.prefill_ns(start, prefill) + output * (constants.decode_row_ns + constants.kv_token_ns * middle)
