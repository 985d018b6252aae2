"""A run as a file for trace viewers (Perfetto, chrome://tracing): steps of the device, and each request's spans.

Knows the Chrome trace event format; refuses to know why a request paused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker.simulation.traffic import Arrival
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId

_DEVICE_PID = 1


class _Span:
    __slots__ = ("name", "since_us", "until_us")

    def __init__(self, name: str, since_us: int, until_us: int) -> None:
        self.name = name
        self.since_us = since_us
        self.until_us = until_us  # of the last step it was in


class TraceViewer:
    """Always: a request that ran has one span from arrival to end, and inside it waits, runs and pauses without gaps.

    A pause is a stretch of steps without a row for a request that has started and not ended.
    """

    def __init__(self, arrivals: Mapping[RequestId, Arrival]) -> None:
        self._arrivals = arrivals
        self._events: list[dict[str, Any]] = [_process(_DEVICE_PID, "device")]
        self._pids: dict[str, int] = {}
        self._spans: dict[RequestId, _Span] = {}
        self._previous_end_us = 0

    def step(self, plan: StepPlan, result: StepResult, started_us: int) -> None:
        ended_us = started_us + result.duration_us
        rows: Counter[str] = Counter()
        prefill: Counter[str] = Counter()
        for row in plan.rows:
            label = self._arrivals[row.request_id].submit.priority_class.label
            rows[label] += 1
            prefill[label] += len(row.token_ids) if len(row.token_ids) > 1 else 0
            self._ran(row.request_id, started_us, ended_us)
        self._previous_end_us = ended_us
        arguments = {"rows": dict(rows), "prefill_tokens": dict(prefill), "budget": plan.token_budget}
        self._events.append(_event("X", f"step {plan.step}", started_us, dur=result.duration_us, args=arguments))
        counts = {priority_class.label: rows[priority_class.label] for priority_class in PriorityClass}
        self._events.append(_event("C", "rows", started_us, args=counts))

    def _ran(self, request_id: RequestId, started_us: int, ended_us: int) -> None:
        span = self._spans.get(request_id)
        if span is None:
            at_us = self._arrivals[request_id].at_us
            self._open(request_id, at_us)
            self._close(request_id, _Span("waits", at_us, started_us))
            span = self._spans[request_id] = _Span("runs", started_us, ended_us)
        elif span.until_us < min(started_us, self._previous_end_us):
            self._close(request_id, span)
            self._close(request_id, _Span("paused", span.until_us, started_us))
            span.since_us = started_us
        span.until_us = ended_us

    def forget(self, request_id: RequestId, now_us: int) -> None:
        """It has ended."""
        span = self._spans.pop(request_id, None)
        if span is not None:
            self._close(request_id, span)
            self._nest("e", request_id, "request", now_us)

    def _open(self, request_id: RequestId, at_us: int) -> None:
        self._nest("b", request_id, "request", at_us)

    def _close(self, request_id: RequestId, span: _Span) -> None:
        self._nest("b", request_id, span.name, span.since_us)
        self._nest("e", request_id, span.name, span.until_us)

    def _nest(self, phase: str, request_id: RequestId, name: str, at_us: int) -> None:
        submit = self._arrivals[request_id].submit
        pid = self._pids.get(submit.tenant_id)
        if pid is None:
            pid = self._pids[submit.tenant_id] = _DEVICE_PID + 1 + len(self._pids)
            self._events.append(_process(pid, f"tenant {submit.tenant_id}"))
        shown = submit.response_id if name == "request" else name
        event = _event(phase, shown, at_us, cat=submit.priority_class.label, id=submit.response_id)
        self._events.append(event | {"pid": pid})

    def write(self, path: Path) -> None:
        """Raises OSError."""
        with path.open("w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": self._events}, file)


def _event(phase: str, name: str, at_us: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": at_us, "pid": _DEVICE_PID, "tid": 1, **rest}


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 1, "args": {"name": name}}
