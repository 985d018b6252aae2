"""What a run meant for its classes and tenants: first tokens, tokens a second, who gave way, who was refused.

Knows requests, plans and events, of a recorded run or of one that might have been; decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpu_worker.simulation.watch import FairnessGap, Services
from scheduler_engine.events import FinishReason, Resource, StepEvents
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import Request, RequestId

LEAST_FOR_A_TAIL = 100  # first tokens: of fewer, the 99th percentile is the slowest one and says nothing


@dataclass(slots=True)
class Row:
    """One class, or one tenant."""

    requests: int = 0
    completed: int = 0
    ended_otherwise: int = 0  # cancelled or failed
    tokens: int = 0
    ttft_us: list[int] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # at the door or from the queue, by reason
    preemptions: Counter[str] = field(default_factory=Counter)  # by lever; step-time holds are counted apart
    step_time_holds: int = 0

    def add(self, other: Row) -> None:
        self.requests += other.requests
        self.completed += other.completed
        self.ended_otherwise += other.ended_otherwise
        self.tokens += other.tokens
        self.ttft_us += other.ttft_us
        self.refused += other.refused
        self.preemptions += other.preemptions
        self.step_time_holds += other.step_time_holds


class _Seen:
    __slots__ = ("arrival_us", "has_first_token", "rows")

    def __init__(self, arrival_us: int, rows: tuple[Row, Row], has_first_token: bool) -> None:
        self.arrival_us = arrival_us
        self.rows = rows
        self.has_first_token = has_first_token


class Stretch(NamedTuple):
    """Steps one after the other, each of which gave each of these one token. ``planned_us`` and ``first_us``: when the
    first was planned and applied, ``last_us``: when the last was applied.
    """

    request_ids: Sequence[RequestId]
    num_steps: int
    busy_us: int
    planned_us: int
    first_us: int
    last_us: int


class Tally:
    """Always: a request counts in the row of its class and in that of its tenant, and ends at most once in each.

    Requests of ``elsewhere`` count in another tally and not here.
    """

    def __init__(self, elsewhere: frozenset[RequestId] = frozenset()) -> None:
        self.elsewhere = elsewhere
        self.classes = {priority_class: Row() for priority_class in PriorityClass}
        self.tenants: dict[str, Row] = {}
        self.lengths: dict[RequestId, int] = {}  # output tokens of those that came to their own end
        self.num_steps = 0
        self.busy_us = 0
        self.began_us: int | None = None
        self.ended_us = 0
        self.is_over = False  # set it at the end of the traffic: what is open may still end, and no rate counts it
        self._seen: dict[RequestId, _Seen] = {}
        self._gap = FairnessGap()
        self._added_span_us = self._added_unserved = 0

    def submitted(self, request: Request, now_us: int) -> None:
        self._begin(now_us)
        if request.request_id in self.elsewhere:
            return
        rows = (self.classes[request.priority_class], self.tenants.setdefault(request.tenant_id, Row()))
        for row in rows:
            row.requests += 1
        self._seen.setdefault(request.request_id, _Seen(now_us, rows, bool(request.delivered_token_ids)))

    def _begin(self, now_us: int | None) -> None:
        if self.began_us is None:
            self.began_us = now_us

    def stepped(
        self, is_empty: bool, duration_us: int, events: StepEvents, services: Services, planned_us: int, now_us: int
    ) -> None:
        """After the step was applied at ``now_us``; ``is_empty``: of its plan."""
        self._begin(None if is_empty else planned_us)
        if not self.is_over:
            self.ended_us = now_us
        if not (is_empty or self.is_over):
            self.num_steps += 1
            self.busy_us += duration_us
        self._take(events.tokens.request_ids, 1, now_us)
        for preempted in events.preempted:
            self._preempted(preempted.request_id, preempted.lever.value, preempted.resource)
        for rejected in events.rejected:
            seen = self._seen.pop(rejected.request_id, None)
            for row in () if seen is None else seen.rows:
                row.refused[rejected.reason.value] += 1
        for finished in events.finished:
            is_own_end = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if is_own_end:
                self.lengths[finished.request_id] = finished.output_tokens
            seen = self._seen.pop(finished.request_id, None)
            for row in () if seen is None else seen.rows:
                row.completed += is_own_end
                row.ended_otherwise += not is_own_end
        self._gap.look(services)

    def decoded(self, stretch: Stretch) -> None:
        """After it, while nobody waited."""
        self._begin(stretch.planned_us)
        if not self.is_over:
            self.ended_us = stretch.last_us
            self.num_steps += stretch.num_steps
            self.busy_us += stretch.busy_us
        self._take(stretch.request_ids, stretch.num_steps, stretch.first_us)
        self._gap.look_at_nobody(stretch.num_steps)

    def _take(self, request_ids: Sequence[RequestId], num_tokens: int, now_us: int) -> None:
        """So many for each of them, the first at this moment."""
        seen, counted = self._seen, 0 if self.is_over else num_tokens
        for request_id in request_ids:
            found = seen.get(request_id)
            if found is None:
                continue
            of_class, of_tenant = found.rows
            of_class.tokens += counted
            of_tenant.tokens += counted
            if not found.has_first_token:
                found.has_first_token = True
                of_class.ttft_us.append(now_us - found.arrival_us)
                of_tenant.ttft_us.append(now_us - found.arrival_us)

    def _preempted(self, request_id: RequestId, lever: str, resource: Resource) -> None:
        seen = self._seen.get(request_id)
        for row in () if seen is None else seen.rows:
            if resource is Resource.STEP_TIME:
                row.step_time_holds += 1
            else:
                row.preemptions[lever] += 1

    def add(self, other: Tally) -> None:
        """What another start of the worker meant, as far as it is known now."""
        for priority_class, row in other.classes.items():
            self.classes[priority_class].add(row)
        for tenant_id, row in other.tenants.items():
            self.tenants.setdefault(tenant_id, Row()).add(row)
        self.num_steps += other.num_steps
        self.busy_us += other.busy_us
        self._added_span_us += other.span_us
        self._added_unserved += other.num_unserved
        self._gap.add(other._gap)

    # reading off

    @property
    def num_unserved(self) -> int:
        """Requests that have neither a first token nor an end."""
        return self._added_unserved + sum(not seen.has_first_token for seen in self._seen.values())

    @property
    def span_us(self) -> int:
        """Without the time between what was added."""
        return self._added_span_us + (0 if self.began_us is None else self.ended_us - self.began_us)

    def report(self) -> dict[str, Any]:
        """Plain data for JSON; durations in milliseconds, tokens a second over the whole span."""
        return {
            "span_s": round(self.span_us / 1_000_000, 3),
            "steps": self.num_steps,
            "busy_percent": round(100 * self.busy_us / self.span_us, 1) if self.span_us else 0.0,
            "classes": {
                priority_class.label: self._row(row) for priority_class, row in self.classes.items() if row.requests
            },
            "tenants": {tenant_id: self._row(row) for tenant_id, row in sorted(self.tenants.items())},
            "fairness_gap_ms": {
                priority_class.label: round(gap_us / 1_000, 3)
                for priority_class, gap_us in self._gap.largest_us.items()
                if self.classes[priority_class].requests
            },
        }

    def _row(self, row: Row) -> dict[str, Any]:
        ordered = sorted(row.ttft_us)
        return {
            "requests": row.requests,
            "completed": row.completed,
            "ended_otherwise": row.ended_otherwise,
            "open": row.requests - row.completed - row.ended_otherwise - row.refused.total(),
            "refused": dict(sorted(row.refused.items())),
            "tokens": row.tokens,
            "tokens_per_s": round(row.tokens * 1_000_000 / self.span_us, 2) if self.span_us else 0.0,
            "ttft_ms": {
                "p50": _quantile_ms(ordered, 500),
                "p99": _quantile_ms(ordered, 990) if len(ordered) >= LEAST_FOR_A_TAIL else None,
            },
            "preemptions": dict(sorted(row.preemptions.items())),
            "step_time_holds": row.step_time_holds,
        }


def _quantile_ms(ordered: list[int], per_mille: int) -> float | None:
    """Nearest rank."""
    return ordered[-(-len(ordered) * per_mille // 1_000) - 1] / 1_000 if ordered else None
