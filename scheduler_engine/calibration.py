"""How predictions of waiting turned out.

Knows pairs of predicted and actual durations; refuses to know whose. Integers only.
"""

from __future__ import annotations

ONE = 1_024


class WaitCalibration:
    """How much longer waits really are than predicted, per class: moving 0.5- and 0.9-quantiles of actual / predicted.

    Each observation moves a quantile by a fixed share of itself, up or down in the proportion that balances at the
    quantile. Always: 1/8 <= q50 <= q90 <= 8, in 1024ths.
    """

    def __init__(self) -> None:
        self.q50 = ONE
        self.q90 = ONE

    def observe(self, *, predicted_us: int, actual_us: int) -> None:
        if predicted_us < 1_000:
            return
        ratio = actual_us * ONE // predicted_us
        self.q50 += max(1, self.q50 // 32) * (1 if ratio > self.q50 else -1)
        step = max(1, self.q90 // 128)
        self.q90 += 9 * step if ratio > self.q90 else -step
        self.q50 = min(8 * ONE, max(ONE // 8, self.q50))
        self.q90 = min(8 * ONE, max(self.q50, self.q90))
