"""What a device did, step by step, seen between loop and executor: plans, tokens, tenants. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from gpu_worker.clock import Clock
from gpu_worker.executor import Executor
from gpu_worker.simulation.traffic import SECOND_US, Arrival
from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId

_FEW = 16  # tenants: 120 pairs


class Watcher(Protocol):
    """Is told of every step that an executor did, and of every request that has ended."""

    def step(self, plan: StepPlan, result: StepResult, started_us: int) -> None: ...

    def forget(self, request_id: RequestId, now_us: int) -> None: ...


class WatchedExecutor:
    """An executor, and watchers that are told of each of its steps. Always: plans and results pass unchanged."""

    def __init__(self, executor: Executor, clock: Clock, watchers: list[Watcher]) -> None:
        self.shape = executor.shape
        self._executor = executor
        self._clock = clock
        self._watchers = watchers

    def execute(self, plan: StepPlan) -> StepResult:
        started_us = self._clock.now_us()
        result = self._executor.execute(plan)
        for watcher in self._watchers:
            watcher.step(plan, result, started_us)
        return result

    def forget(self, request_id: RequestId) -> None:
        self._executor.forget(request_id)
        for watcher in self._watchers:
            watcher.forget(request_id, self._clock.now_us())

    def close(self) -> None:
        self._executor.close()


@dataclass(slots=True)
class Second:
    """One second of the device, in which a step counts as a whole if it began there."""

    busy_us: int = 0
    steps: int = 0
    decodes: Counter[PriorityClass] = field(default_factory=Counter)  # rows, summed over steps
    prefill: Counter[PriorityClass] = field(default_factory=Counter)  # tokens, with those computed again
    work_ns: Counter[PriorityClass] = field(default_factory=Counter)  # what tokens computed for the first time cost


class Timeline:
    """Seconds of a run, and the lengths of its steps. Always: the steps of all seconds are those of ``step_us``."""

    def __init__(self, arrivals: Mapping[RequestId, Arrival], cost: CostConstants) -> None:
        self.seconds: dict[int, Second] = {}
        self.step_us: Counter[int] = Counter()
        self._arrivals = arrivals
        self._cost = cost
        self._computed: dict[RequestId, int] = {}

    def step(self, plan: StepPlan, result: StepResult, started_us: int) -> None:
        second = self.seconds.setdefault(started_us // SECOND_US, Second())
        second.busy_us += result.duration_us
        second.steps += 1
        self.step_us[result.duration_us] += 1
        arrivals, computed, row_ns = self._arrivals, self._computed, self._cost.row_ns
        decodes, prefill, work_ns = second.decodes, second.prefill, second.work_ns
        for row in plan.rows:
            request_id, count = row.request_id, len(row.token_ids)
            priority_class, end = arrivals[request_id].submit.priority_class, row.start + count
            if count == 1:
                decodes[priority_class] += 1
            else:
                prefill[priority_class] += count
            before = computed.get(request_id, 0)
            if end > before:
                computed[request_id] = end
                work_ns[priority_class] += row_ns(before, end - before)

    def forget(self, request_id: RequestId, now_us: int) -> None:
        self._computed.pop(request_id, None)

    def total_work_us(self, from_us: int, until_us: int) -> int:
        """``work_us`` of all classes."""
        return sum(self.work_us(priority_class, from_us, until_us) for priority_class in PriorityClass)

    def work_us(self, priority_class: PriorityClass, from_us: int, until_us: int) -> int:
        """Device time of what a class computed for the first time, prompt and output, without the fixed part of steps:
        of those begun in seconds of ``[from, until)``. A measure of useful work that no mix of lengths distorts.
        """
        work_ns = sum(
            second.work_ns[priority_class]
            for number, second in self.seconds.items()
            if from_us <= number * SECOND_US < until_us
        )
        return work_ns // 1_000


class Services(Protocol):
    """The part of an engine that says who waits and what each was charged."""

    def waiting_services(self, priority_class: PriorityClass) -> Sequence[tuple[str, int]]: ...


class FairnessGap:
    """How far service of two tenants of a class drifts apart while both have somebody waiting.

    Always: ``largest_us[class]`` is the largest difference, over any stretch of time in which two tenants waited
    without a break, between what the one and the other were charged in it, each divided by its weight. While more than
    16 tenants of a class wait, they are compared in every 16th look only.
    """

    def __init__(self) -> None:
        self.largest_us = dict.fromkeys(PriorityClass, 0)
        self._skip = dict.fromkeys(PriorityClass, 0)
        self._drifts: dict[PriorityClass, dict[tuple[str, str], tuple[int, int]]] = {
            priority_class: {} for priority_class in PriorityClass
        }

    def look(self, scheduler: Services) -> None:
        """Between two steps, after each. O(tenants waiting, squared)."""
        for priority_class in PriorityClass:
            if self._skip[priority_class]:
                self._skip[priority_class] -= 1
                continue
            services = scheduler.waiting_services(priority_class)
            self._skip[priority_class] = 0 if len(services) <= _FEW else _FEW - 1
            before = self._drifts[priority_class]
            if len(services) < 2:
                before.clear()
                continue
            self._drifts[priority_class] = drifts = {}
            for (one, one_us), (other, other_us) in combinations(sorted(services), 2):
                apart_us = one_us - other_us
                least_us, most_us = before.get((one, other), (apart_us, apart_us))
                drifts[one, other] = least_us, most_us = min(least_us, apart_us), max(most_us, apart_us)
                self.largest_us[priority_class] = max(self.largest_us[priority_class], most_us - least_us)

    def add(self, other: FairnessGap) -> None:
        """The largest of both."""
        for priority_class, gap_us in other.largest_us.items():
            self.largest_us[priority_class] = max(self.largest_us[priority_class], gap_us)

    def look_at_nobody(self, num_looks: int) -> None:
        """As so many looks while nobody waits."""
        for priority_class, drifts in self._drifts.items():
            if num_looks > self._skip[priority_class]:
                drifts.clear()
            self._skip[priority_class] = max(0, self._skip[priority_class] - num_looks)
