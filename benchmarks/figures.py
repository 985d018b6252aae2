"""Quantiles and tables that all benchmarks share. Knows numbers; refuses to know what they are of."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all do not pass; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1_000) // 1_000) - 1)]


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99)}
    return {name: None if value is None else round(1_000 * value, 2) for name, value in found.items()}


def machine() -> dict[str, object]:
    """What a figure must be read beside. ``calib_us``: a fixed Python loop, best of five; this CPU's speed of today."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "calib_us": min(_loop_us() for _ in range(5)),
    }


def _loop_us() -> int:
    started = time.perf_counter_ns()
    total = 0
    for number in range(10_000):
        total += number * number
    return (time.perf_counter_ns() - started) // 1_000


def say(line: str) -> None:
    """To the person, so that standard output can end with JSON alone."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def report(found: Mapping[str, Any], *, as_json: bool) -> None:
    """One line of JSON, or one row for each figure."""
    sys.stdout.write((json.dumps(found) if as_json else table(found)) + "\n")


def table(found: Mapping[str, Any], prefix: str = "") -> str:
    lines = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            lines.append(table(value, f"{prefix}{name}."))
        else:
            lines.append(f"{prefix + name:<33} {'-' if value is None else value}")
    return "\n".join(line for line in lines if line)
