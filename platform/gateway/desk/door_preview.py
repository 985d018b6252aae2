"""What edited limits would have refused of the calls that came: the door's arithmetic over recorded operations. Pure.

Knows calls that were let in; a call that was refused left no record, so what a wider limit lets in is not told.
Buckets start full, as after a quiet minute; money is not among it, since windows outlast the span.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tenants.policy_changes import Change

MINUTE_US = 60_000_000


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One operation that was let in. ``used_tokens`` come due at ``ended_us`` in place of the reserved ones."""

    at_us: int
    ended_us: int
    place: str
    reserved_tokens: int
    used_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Of ``num_calls`` at a place, how many a limit would have refused, or sent to the class ``overflow_to``."""

    place: str
    num_calls: int
    by_limit: Mapping[str, int]
    overflow_to: str | None = None


class _Bucket:
    """A token bucket of one minute's rate, in exact integers: level x MINUTE_US."""

    def __init__(self, per_minute: int) -> None:
        self._capacity = per_minute * MINUTE_US
        self._per_us = per_minute
        self._level = self._capacity
        self._at_us = 0

    def holds(self, amount: int, at_us: int) -> bool:
        self._level = min(self._capacity, self._level + (at_us - self._at_us) * self._per_us)
        self._at_us = at_us
        return amount * MINUTE_US <= self._level

    def take(self, amount: int) -> None:
        self._level -= amount * MINUTE_US

    def give_back(self, amount: int) -> None:
        self._level = min(self._capacity, self._level + amount * MINUTE_US)


def in_force(place: str, rows: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The place's limits as the door reads them: nothing overflows into a class that is not granted."""
    row = rows[place]
    tenant, lower = place.partition(" ")[0], row.get("overflow_to")
    is_granted = rows.get(f"{tenant} {lower}", {}).get("allowed")
    return row if lower is None or is_granted else {**row, "overflow_to": None}


def without_effect(rows: Mapping[str, Mapping[str, Any]], edit: Iterable[Change]) -> list[str]:
    """Places of the tenants that the edit touches whose overflow goes to a class that they are not granted."""
    tenants = {change.place.partition(" ")[0] for change in edit}
    return [
        place
        for place, row in rows.items()
        if place.partition(" ")[0] in tenants and row.get("overflow_to") and not in_force(place, rows)["overflow_to"]
    ]


def refused(calls: Iterable[Call], limits: Mapping[str, Mapping[str, Any]]) -> list[Refused]:
    """By place, of those places that ``limits`` (``policy_changes.places``) names and calls came to."""
    by_place: dict[str, list[Call]] = {}
    for call in sorted(calls):
        if call.place in limits:
            by_place.setdefault(call.place, []).append(call)
    return [
        Refused(place, len(found), _refused(found, limits[place]), limits[place].get("overflow_to"))
        for place, found in sorted(by_place.items())
    ]


def _refused(calls: list[Call], limits: Mapping[str, Any]) -> Mapping[str, int]:
    requests, tokens, at_once = (limits[name] for name in ("requests_per_minute", "tokens_per_minute", "concurrency"))
    if not limits["allowed"]:
        return {"not allowed": len(calls)}
    rate = None if requests is None else _Bucket(requests)
    budget = None if tokens is None else _Bucket(tokens)
    running: list[tuple[int, int]] = []  # (end, tokens to give back)
    counted: Counter[str] = Counter()
    for call in calls:
        while running and running[0][0] <= call.at_us:
            _, unused = heapq.heappop(running)
            if budget is not None:
                budget.give_back(unused)
        broken = (
            ("at once", at_once is not None and len(running) >= at_once),
            ("requests a minute", rate is not None and not rate.holds(1, call.at_us)),
            ("tokens a minute", budget is not None and not budget.holds(call.reserved_tokens, call.at_us)),
        )
        if reason := next((name for name, is_broken in broken if is_broken), ""):
            counted[reason] += 1
            continue
        if rate is not None:
            rate.take(1)
        if budget is not None:
            budget.take(call.reserved_tokens)
        heapq.heappush(running, (call.ended_us, max(0, call.reserved_tokens - call.used_tokens)))
    return dict(counted)
