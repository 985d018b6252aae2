"""What a story costs those who are in it: the same requests run with and without the others, as ratios and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Context

from gpu_worker.simulated import DeviceProfile
from gpu_worker.simulation.ceiling import batch_ceiling
from gpu_worker.simulation.clients import View, quantiles_ms
from gpu_worker.simulation.report import report
from gpu_worker.simulation.run import Outcome, Simulation
from gpu_worker.simulation.stories import OVERLOAD_VALUES, Story
from gpu_worker.simulation.traffic import SECOND_US, Arrival, Pace
from scheduler_engine.policy import PolicySnapshot, PriorityClass

INTERACTIVE, _, BATCH = PriorityClass


def only(arrivals: Sequence[Arrival], name: str) -> list[Arrival]:
    """Those of one class or one tenant."""
    return [each for each in arrivals if name in (each.submit.priority_class.label, each.submit.tenant_id)]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a comparison, with its target where it has one."""

    name: str
    value: float | None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def target(self) -> str | None:
        if self.at_most is not None:
            return f"≤ {_cell(self.at_most)}"
        return None if self.at_least is None else f"≥ {_cell(self.at_least)}"

    @property
    def is_met(self) -> bool:
        """True where there is no target."""
        if self.at_most is not None:
            return self.value is not None and self.value <= self.at_most
        return self.at_least is None or (self.value is not None and self.value >= self.at_least)


class Comparison:
    """A story with one seed on one device, and what it is compared with; the other runs are made by ``figures``."""

    def __init__(
        self,
        name: str,
        story: Story,
        device: DeviceProfile,
        policy: PolicySnapshot,
        seed: int,
        run: Callable[[Simulation], Outcome],
    ) -> None:
        self.story = story
        self._device = device
        self._policy = policy
        self._seed = seed
        self._pace = Pace(device)
        self._arrivals = self.story.tell(seed, self._pace)
        self._run = run
        self.whole = self._simulate(self._arrivals)
        self.result = report(self.whole, story=name, seed=seed)

    def _simulate(self, arrivals: Sequence[Arrival], policy: PolicySnapshot | None = None) -> Outcome:
        return self._run(Simulation(self._device, arrivals, policy=policy or self._policy, seed=self._seed))

    def figures(self) -> list[Figure]:
        found = list(self._calm())
        if self.story.loud_tenant is not None:
            found.extend(self._loud_tenant(self.story.loud_tenant))
        if self.story.has_deadlines:
            found.extend(self._deadlines())
        elif only(self._arrivals, BATCH.label):
            found.extend(self._flooded())
        return found

    def _calm(self) -> Iterator[Figure]:
        result = self.result
        yield Figure("requests that lost their memory, share", result["preempted_share"], at_most=0.05)
        yield Figure("and how often one of them", result["preempted_most"], at_most=4)
        yield Figure("tokens computed twice, share", result["recomputed_share"], at_most=0.02)
        gap = result["fairness_gap_ms"]
        yield Figure("fairness gap, ms", gap["max"], at_most=gap["bound"])

    def _window_us(self) -> tuple[int, int]:
        start_s, end_s = self.story.window_s
        return self._pace.us(start_s * SECOND_US), self._pace.us(end_s * SECOND_US)

    def _flooded(self) -> Iterator[Figure]:
        """Chats beside batch, against chats alone and batch alone."""
        chats = self.whole.clients.of_class(INTERACTIVE)
        alone = self._simulate(only(self._arrivals, INTERACTIVE.label)).clients.of_class(INTERACTIVE)
        batch = self._simulate(only(self._arrivals, BATCH.label))
        ttft_ms, alone_ms = _p99_ms(chats), _p99_ms(alone)
        has_targets = self.story.has_targets
        yield Figure("interactive TTFT p99, ms", ttft_ms, at_most=500 if has_targets else None)
        yield Figure("interactive TTFT p99 alone, ms", alone_ms)
        yield Figure("times alone", _ratio(ttft_ms, alone_ms), at_most=2.5 if has_targets else None)
        yield Figure("interactive ITL p99, ms", quantiles_ms(chats.gaps)["p99"], at_most=50 if has_targets else None)
        window = self._window_us()
        share = _ratio(self.whole.timeline.work_us(BATCH, *window), batch.timeline.work_us(BATCH, *window))
        yield Figure("batch work, share of batch alone", share, at_least=0.9 if has_targets else None)
        yield Figure("the most that such gaps leave, by the cost model", self._ceiling(batch))

    def _ceiling(self, batch: Outcome) -> float | None:
        """None for chats that promise no gap between tokens."""
        gap_ms = self._policy.classes[INTERACTIVE].tbt_target_ms
        if gap_ms is None:
            return None
        found = batch_ceiling(
            only(self._arrivals, INTERACTIVE.label),
            self.whole.timeline,
            batch.timeline,
            base_us=self._device.cost.base_ns // 1_000,
            gap_us=gap_ms * 1_000,
            end_us=min(self._window_us()[1], self.whole.virtual_us),
        )
        return None if found is None else round(found, 3)

    def _loud_tenant(self, loud: str) -> Iterator[Figure]:
        """The others of its class without it; and the same work as if it were one tenant's, which isolates nobody."""
        (rank,) = {each.submit.priority_class for each in self._arrivals if each.submit.tenant_id == loud}
        others = [each for each in self._arrivals if each.submit.tenant_id != loud]
        together = self._simulate(
            [replace(each, submit=replace(each.submit, tenant_id=loud)) for each in self._arrivals]
        )
        whole, without = self.whole.clients, self._simulate(others).clients
        ttft_ms, without_ms = _p99_ms(whole.of_other_keys(rank, loud)), _p99_ms(without.of_class(rank))
        has_targets = self.story.has_targets
        yield Figure(f"TTFT p99 of all but {loud}, ms", ttft_ms)
        yield Figure(f"the same without {loud}, ms", without_ms)
        yield Figure("the same without isolation, ms", _p99_ms(together.clients.of_other_keys(rank, loud)))
        yield Figure(f"times without {loud}", _ratio(ttft_ms, without_ms), at_most=2.5 if has_targets else None)
        ended = _ratio(whole.of_key(loud).last_end_us, together.clients.of_key(loud).last_end_us)
        yield Figure(f"{loud} ends, times without isolation", ended, at_most=1.03 if has_targets else None)
        yield Figure(
            "Retry-After kept, share", self.result["retry_promise_kept"], at_least=0.9 if has_targets else None
        )

    def _deadlines(self) -> Iterator[Figure]:
        """Against what the device does with the same chats when nobody is in a hurry and nothing else is there."""
        start_us, end_us = self._window_us()
        clients, timeline = self.whole.clients, self.whole.timeline
        capacity_per_s = self._capacity_per_s()
        chats = clients.of_class(INTERACTIVE)
        on_time = sum(n for second, n in chats.on_time.items() if start_us <= second * SECOND_US < end_us)
        goodput_per_s = on_time * SECOND_US / (end_us - start_us)
        yield Figure("capacity, chats a second", round(capacity_per_s, 2))
        yield Figure("on time in the overload, chats a second", round(goodput_per_s, 2))
        yield Figure("share of the capacity", round(goodput_per_s / capacity_per_s, 3), at_least=0.95)
        yield Figure("late but let in, share", round(chats.late / max(1, chats.completed), 4), at_most=0.01)
        served = []
        for tenant_id, value in OVERLOAD_VALUES.items():
            view = clients.of_key(tenant_id)
            served.append(view.completed / max(1, view.requests))
            yield Figure(f"served of value {value}, share", round(served[-1], 3))
        yield Figure(
            "served by value, dearest first (1: yes)", float(served == sorted(served, reverse=True)), at_least=1
        )
        yield Figure("refusals without Retry-After", self.result["refusals_without_retry_after"], at_most=0)
        yield Figure("Retry-After kept, share", self.result["retry_promise_kept"], at_least=0.9)
        settled_us = start_us + (end_us - start_us) // 4
        batch_in, batch_after = timeline.work_us(BATCH, settled_us, end_us), timeline.work_us(BATCH, end_us, 1 << 62)
        yield Figure("batch work in the last three quarters of the overload, us", batch_in, at_most=0)
        yield Figure("batch work after it, us", batch_after, at_least=1)
        calm_us = self._pace.us(10 * SECOND_US)
        before = _per_s(timeline.total_work_us(0, start_us), start_us)
        after = _per_s(timeline.total_work_us(end_us + calm_us, end_us + start_us), start_us - calm_us)
        yield Figure("work a second from 10 s after it, share of before", _ratio(after, before), at_least=0.95)

    def _capacity_per_s(self) -> float:
        first, second, third = self._policy.classes
        patient = replace(self._policy, classes=(replace(first, max_queue_wait_ms=None), second, third))
        at_once = [
            Arrival(0, replace(each.submit, remaining_hard_deadline_us=None))
            for each in only(self._arrivals, INTERACTIVE.label)
        ]
        view = self._simulate(at_once, patient).clients.of_class(INTERACTIVE)
        return view.completed * SECOND_US / view.last_end_us


def _p99_ms(view: View) -> float | None:
    return quantiles_ms(view.ttft)["p99"]


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else round(value / other, 3)


def _per_s(count: int, duration_us: int) -> float:
    return count * SECOND_US / max(1, duration_us)


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several seeds, in words."""

    name: str
    median: str
    range: str
    target: str
    verdict: str  # "met" by every seed, "MISSED", or "" where there is no target


def spreads(seeds: Sequence[Sequence[Figure]]) -> list[Spread]:
    """Figure by figure over the seeds."""
    found = []
    for column in zip(*seeds, strict=True):
        figure = column[0]
        values = [each.value for each in column if each.value is not None]
        verdict = "met" if all(each.is_met for each in column) else "MISSED"
        found.append(
            Spread(
                name=figure.name,
                median=_cell(statistics.median(values)) if values else "-",
                range=f"{_cell(min(values))} … {_cell(max(values))}" if len(set(values)) > 1 else "",
                target=figure.target or "",
                verdict="" if figure.target is None else verdict,
            )
        )
    return found


def spread_table(seeds: Sequence[Sequence[Figure]]) -> str:
    """Median and range of every figure over the seeds, with its target and whether every seed meets it."""
    lines = [f"{'':<58}{'median':>12}  {'least … most':<24}{'target':<10}".rstrip()]
    lines.extend(
        f"{each.name:<58}{each.median:>12}  {each.range:<24}{each.target:<10}{each.verdict}".rstrip()
        for each in spreads(seeds)
    )
    return "\n".join(lines)


def _cell(value: float) -> str:
    """Whole above 1,000, else in three digits; written out, never as a power of ten."""
    is_whole = value == int(value) or abs(value) >= 1_000
    return f"{value:,.0f}" if is_whole else f"{Context(prec=3).create_decimal_from_float(value).normalize():,f}"
