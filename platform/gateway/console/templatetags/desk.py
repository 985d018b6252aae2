"""A replay's result as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from django import template

from gateway.desk.telling import telling

register = template.Library()
register.simple_tag(telling)

RUNS = (("happened", "happened"), ("model", "model"), ("what_if", "this edit"))


@register.filter
def words(text: str) -> list[str]:
    return text.split()


@register.filter
def named(name: str, names: Mapping[str, str]) -> str:
    """A tenant's name for its id; anything else as it is."""
    return names.get(name, name)


@register.filter
def unix_us(since_1970_us: int) -> datetime:
    return datetime.fromtimestamp(since_1970_us // 1_000_000, UTC)


@register.filter
def lasting(seconds: int) -> str:
    return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


@register.filter
def signed(percent: float | None) -> str:
    return "unknown" if percent is None else f"{percent:+.1f} %"


@register.filter
def replay_rows(result: Mapping[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Three rows a class or tenant: what happened, what the model makes of the same policy, and what of the edit."""
    names = dict.fromkeys(name for run, _ in RUNS for name in result[run][kind])
    all_per_s = {run: sum(row["tokens_per_s"] for row in result[run][kind].values()) for run, _ in RUNS}
    for name in names:
        is_first = True
        for run, title in RUNS:
            row = result[run][kind].get(name)
            if row is not None:
                yield {
                    "name": name,
                    "run": title,
                    "run_key": run,
                    "is_first": is_first,
                    "requests": row["requests"],
                    "refused": sum(row["refused"].values()),
                    "p50": _ms(row["ttft_ms"]["p50"]),
                    "p99": _ms(row["ttft_ms"]["p99"]),
                    "p99_spread": _between(row.get("spread", {}).get("ttft_p99")),
                    "tokens_per_s": row["tokens_per_s"],
                    "share_percent": 100 * row["tokens_per_s"] / all_per_s[run] if all_per_s[run] else None,
                    "preempted": sum(row["preemptions"].values()),
                    "held": row["step_time_holds"],
                }
                is_first = False


def _between(spread: list[float] | None) -> str:
    """Nothing where there was one draw, or none at all."""
    return "" if spread is None or spread[0] == spread[1] else f"{_ms(spread[0])} … {_ms(spread[1])}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
