"""Quantiles of the histograms that workers send. Knows the buckets; refuses to know what was measured."""

from __future__ import annotations

from wire.messages import HISTOGRAM_BOUNDS_MS, Histogram


def since(newer: Histogram, older: Histogram) -> Histogram:
    """What was counted between two readings of the same growing histogram."""
    counts = tuple(new - old for new, old in zip(newer.counts, older.counts, strict=True))
    return Histogram(counts=counts, sum_us=newer.sum_us - older.sum_us)


def quantile_ms(histogram: Histogram, percent: int) -> int | None:
    """The value under which ``percent`` of the counts lie, in whole milliseconds; None when nothing was counted.

    Linear inside a bucket, as Prometheus' ``histogram_quantile`` does; above the last bound that bound is given.
    """
    total = sum(histogram.counts)
    if not total:
        return None
    lower, rank = 0, total * percent  # in hundredths of a count, and of what is not counted yet
    for upper, count in zip(HISTOGRAM_BOUNDS_MS, histogram.counts, strict=False):
        if 100 * count >= rank:
            return lower + ((upper - lower) * rank + 50 * count) // (100 * count)
        lower, rank = upper, rank - 100 * count
    return HISTOGRAM_BOUNDS_MS[-1]
