"""Several runs that might have been as one: the median of each figure, and how far the draws lie apart.

Knows reports (``tally``); refuses to know what made them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

_SPREAD: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "ttft_p50": lambda row: row["ttft_ms"]["p50"],
    "ttft_p99": lambda row: row["ttft_ms"]["p99"],
    "tokens_per_s": lambda row: row["tokens_per_s"],
}


def middle(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each figure the median of the reports (a value that one of them has), and ``spread``: its least and its most."""
    found: dict[str, Any] = _median(reports)
    for kind in ("classes", "tenants"):
        for name, row in found[kind].items():
            rows = [report[kind][name] for report in reports if name in report[kind]]
            row["spread"] = {figure: _range([read(each) for each in rows]) for figure, read in _SPREAD.items()}
    gaps = found["fairness_gap_ms"]
    found["fairness_gap_spread_ms"] = {
        name: _range([report["fairness_gap_ms"].get(name) for report in reports]) for name in gaps
    }
    return found


def _median(values: Sequence[Any]) -> Any:
    """Of what some of the values lack: a part by those that have it, a count of what never happened there is 0."""
    parts = [value for value in values if isinstance(value, dict)]
    if not parts:
        numbers = [value for value in values if value is not None]
        return median_low(numbers) if numbers else None
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        held = [part[key] for part in parts if key in part]
        is_part = any(isinstance(each, dict) for each in held)
        found[key] = _median(held if is_part else held + [0] * (len(parts) - len(held)))
    return found


def _range(values: Sequence[float | None]) -> list[float] | None:
    found = [value for value in values if value is not None]
    return [min(found), max(found)] if found else None
