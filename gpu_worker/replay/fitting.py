"""How long a step would have taken: a device's cost model from the steps of a log, and what the day did to it.

Knows sums over plans and measured lengths; refuses to know requests. Floats are free here: nothing is decided by them.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import StepPlan

_PRIOR = 1e-4  # weight of the calibrated constants against one step's worth of evidence
_BLOCK = 32  # steps whose noise is shuffled among them
_LEAST_RATIO, _MOST_RATIO = 0.05, 20.0


class Load(NamedTuple):
    """What makes a step long. ``attended``: tokens that rows attend to; ``context``: new tokens x tokens before."""

    steps: int
    prefill: int
    context: int
    decodes: int
    attended: int
    copies: int


def load_of(plan: StepPlan) -> Load:
    prefill = context = 0
    attended = plan.decodes.num_attended
    for chunk in plan.chunks:
        count = len(chunk.token_ids)
        prefill += count
        context += count * (chunk.start + count // 2)
        attended += chunk.start + count
    return Load(1, prefill, context, len(plan.decodes), attended, len(plan.swap_out) + len(plan.swap_in))


def decodes_load(num_rows: int, num_attended: int) -> Load:
    """Of a step in which everybody decodes."""
    return Load(1, 0, 0, num_rows, num_attended, 0)


class StepModel:
    """Predicted lengths, from a least-squares fit of relative errors: sum of (predicted / measured - 1) squared.

    A part of the load that never varied keeps its calibrated constant; none is ever below 0.
    """

    def __init__(self, cost: CostConstants, bytes_per_block: int) -> None:
        self._prior = [
            cost.base_ns / 1_000,
            cost.prefill_token_ns / 1_000,
            cost.prefill_context_ns / 1_000,
            cost.decode_row_ns / 1_000,
            cost.kv_token_ns / 1_000,
            cost.copy_ns(1, bytes_per_block) / 1_000,
        ]
        self.microseconds = list(self._prior)  # per unit of each field of Load
        size = len(Load._fields)
        self._products = [[0.0] * size for _ in range(size)]
        self._sums = [0.0] * size

    def observe(self, load: Load, duration_us: int) -> None:
        if duration_us <= 0:
            return
        row = [(i, part / duration_us) for i, part in enumerate(load) if part]
        for i, part in row:
            self._sums[i] += part
            products = self._products[i]
            for j, other in row:
                products[j] += part * other

    def fit(self) -> None:
        """Solve for what was observed; parts that come out below 0 are 0, and the rest is solved again."""
        free = list(range(len(self._prior)))
        while True:
            found = self._solve(free)
            negative = [i for i, value in zip(free, found, strict=True) if value < 0]
            if not negative:
                break
            free = [i for i in free if i not in negative]
        self.microseconds = [0.0] * len(self._prior)
        for i, value in zip(free, found, strict=True):
            self.microseconds[i] = value

    def _solve(self, free: list[int]) -> list[float]:
        """Ridge towards the calibrated constants, scaled by each part's own size."""
        scale = {i: _PRIOR * (self._products[i][i] or 1.0) for i in free}
        matrix = [
            [self._products[i][j] + (scale[i] if i == j else 0.0) for j in free]
            + [self._sums[i] + scale[i] * self._prior[i]]
            for i in free
        ]
        return _solved(matrix)

    def predict_us(self, load: Load) -> float:
        steps, prefill, context, decodes, attended, copies = load
        base_us, prefill_us, context_us, decode_us, attended_us, copy_us = self.microseconds
        work_us = steps * base_us + prefill * prefill_us + context * context_us + decodes * decode_us
        return work_us + attended * attended_us + copies * copy_us


def _solved(matrix: list[list[float]]) -> list[float]:
    """Gauss-Jordan on an augmented, positive definite matrix."""
    size = len(matrix)
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        divisor = matrix[i][i]
        matrix[i] = [value / divisor for value in matrix[i]]
        for j in range(size):
            if j != i and matrix[j][i]:
                factor = matrix[j][i]
                matrix[j] = [value - factor * other for value, other in zip(matrix[j], matrix[i], strict=True)]
    return [row[-1] for row in matrix]


class Weather:
    """What the device did beyond the model, by time: measured over predicted, of each recorded step.

    A step that might have been takes the factor of one of the 32 recorded steps that its moment lies among, none twice
    before all of them had their turn, in an order that each ``draw`` shuffles anew. Slow minutes stay slow, noise stays
    noise, and a run of the recorded policy does not get back the very noise that it is measured against. Not one fixed
    factor for each moment: a quick step would end at a moment that has the same one again, a slow step would jump over
    the next, and the device would seem quicker than it was.
    """

    def __init__(self, began_us: Sequence[int], ratios: Sequence[float], draw: int = 0) -> None:
        self._began_us = began_us
        self._ratios = [min(_MOST_RATIO, max(_LEAST_RATIO, ratio)) for ratio in ratios]
        self._random = random.Random(draw)
        self._block = -1
        self._left: list[float] = []  # of the block, in the order of their turns from the end

    def at(self, now_us: int) -> float:
        if not self._ratios:
            return 1.0
        block = max(0, bisect_right(self._began_us, now_us) - 1) // _BLOCK
        if block != self._block or not self._left:
            self._block, self._left = block, self._ratios[block * _BLOCK : (block + 1) * _BLOCK]
            self._random.shuffle(self._left)
        return self._left.pop()
