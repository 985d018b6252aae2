"""What a step and a copy cost: constants of a device, and their online correction.

Knows token counts and durations; refuses to know requests. Integers only, so that a replay fits the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConstants:
    """Additive model of a device, all integers, nanoseconds unless said.

    step = base + prefill_token * n + prefill_context * sum(n_i * context_i) + decode_row * rows
           + kv_token * tokens attended
    copy = copy_operation per block + bytes / copy_bytes_per_us
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


_ONE = 1_024  # scales are in 1024ths
_SCALE_MIN = _ONE // 32
_SCALE_MAX = _ONE * 32
_MOST_PER_STEP = _ONE // 8  # a hiccup is not a new device: one step alone changes a scale by an eighth at most
_MOST_DOUBLINGS = 3  # but steps that err the same way one after the other are believed more and more
_FAR_OFF_DIVISOR = 4  # an error of more than a quarter of the step
_BASE_PER_PREFILL_TOKEN = 512  # no device computes more prompt tokens in the time of a step's fixed part


class FittedCost:
    """The constants as the device shows them to be: one factor on decodes and the fixed part, one on prefill.

    Each step moves both factors towards its measured length, each by its share of the predicted length (normalised
    least mean squares): steps without prefill teach the one, prompts the other, and a processor that changes its speed
    is followed within a few steps. Always: 1/32 <= each factor <= 32. All costs are predictions in nanoseconds.
    """

    def __init__(self, constants: CostConstants, bytes_per_block: int) -> None:
        # a factor on nothing stays nothing: a calibration that was disturbed must not make prompts look free
        least_ns = constants.base_ns // _BASE_PER_PREFILL_TOKEN
        self._constants = replace(constants, prefill_token_ns=max(1, least_ns, constants.prefill_token_ns))
        self._bytes_per_block = bytes_per_block
        self._decode_scale = _ONE
        self._prefill_scale = _ONE
        self.version = 0  # of the factors: how often they were moved
        self._streak = 0  # steps in a row that were far longer (positive) or far shorter (negative) than predicted
        self.step_us = max(1, constants.base_ns // 1_000)  # moving average of step lengths

    @property
    def base_ns(self) -> int:
        """What every step costs, whatever is in it."""
        return self._constants.base_ns * self._decode_scale // _ONE

    def decode_ns(self, num_rows: int, num_tokens_attended: int) -> int:
        constants = self._constants
        cost = num_rows * constants.decode_row_ns + num_tokens_attended * constants.kv_token_ns
        return cost * self._decode_scale // _ONE

    def prefill_ns(self, start: int, count: int) -> int:
        """Computing positions ``[start, start + count)`` in one row."""
        if count == 0:
            return 0
        constants = self._constants
        context = constants.prefill_context_ns * count * (start + count // 2)
        cost = constants.prefill_token_ns * count + context + constants.kv_token_ns * (start + count)
        return cost * self._prefill_scale // _ONE

    def prefill_fitting(self, room_ns: int, *, start: int, most: int) -> int:
        """The most tokens at ``start``, up to ``most``, whose cost stays within ``room_ns``."""
        constants = self._constants
        room = room_ns * _ONE // self._prefill_scale - constants.kv_token_ns * (start + most)
        token = max(1, constants.prefill_token_ns + constants.prefill_context_ns * (start + most // 2))
        return min(most, max(0, room) // token)

    def request_ns(self, *, start: int, prefill: int, output: int) -> int:
        """A whole request from ``start``: its prefill, then ``output`` decode rows over a growing context."""
        middle = start + prefill + output // 2
        return self.prefill_ns(start, prefill) + self.decode_ns(output, output * middle)

    def copy_ns(self, num_blocks: int) -> int:
        """Copying blocks one way."""
        return self._constants.copy_ns(num_blocks, self._bytes_per_block)

    def observe(self, *, decode_ns: int, prefill_ns: int, copy_ns: int, duration_us: int) -> None:
        """Learn from a step that took ``duration_us``; ``decode_ns`` was predicted with the fixed part in it."""
        error_ns = duration_us * 1_000 - decode_ns - prefill_ns - copy_ns
        self._note_streak(error_ns, duration_us * 1_000)
        most = _MOST_PER_STEP << min(_MOST_DOUBLINGS, max(0, abs(self._streak) - 1))
        squares = decode_ns * decode_ns + prefill_ns * prefill_ns
        before = (self._decode_scale, self._prefill_scale)
        if squares:
            self._decode_scale = _moved(self._decode_scale, error_ns * decode_ns, squares, most)
            if prefill_ns:
                self._prefill_scale = _moved(self._prefill_scale, error_ns * prefill_ns, squares, most)
        self.version += before != (self._decode_scale, self._prefill_scale)
        self.step_us = max(1, self.step_us + (duration_us - self.step_us) // 8)

    def _note_streak(self, error_ns: int, duration_ns: int) -> None:
        if abs(error_ns) * _FAR_OFF_DIVISOR <= duration_ns:
            self._streak = 0
        elif error_ns > 0:
            self._streak = max(0, self._streak) + 1
        else:
            self._streak = min(0, self._streak) - 1


def _moved(scale: int, up: int, down: int, most: int) -> int:
    """``scale`` moved a quarter of the way to 1 + up / down times itself, by ``most`` at most, within bounds; rounded
    towards no change, so that a true model stays put.
    """
    by = min(most, abs(up) * _ONE // (4 * down))
    moved = scale + scale * by // _ONE if up > 0 else scale - scale * min(by, _ONE // 2) // _ONE
    return max(_SCALE_MIN, min(_SCALE_MAX, moved))


def to_us(cost_ns: int) -> int:
    """Nanoseconds as microseconds, rounded up."""
    return -(-cost_ns // 1_000)
