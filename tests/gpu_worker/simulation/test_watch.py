"""What a run tells of its device: seconds, useful work, and how far two tenants drift apart."""

from __future__ import annotations

from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.traffic import Arrival, submit_of
from gpu_worker.simulation.watch import FairnessGap, Timeline
from gpu_worker.telling.fairness_watch import gap_bound_us
from scheduler_engine.plan import ScheduledRow, StepPlan, StepResult
from scheduler_engine.policy import PriorityClass, gpu_classes
from scheduler_engine.request import RequestId

TOY = DEVICES["toy"]
BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


def row(name: str, start: int, count: int) -> ScheduledRow:
    return ScheduledRow(RequestId(name), range(count), start, [], True, [], None)


def plan(*rows: ScheduledRow) -> StepPlan:
    return StepPlan(step=0, chunks=rows, swap_out=(), swap_in=(), token_budget=0, wake_at_us=None)


def test_what_is_computed_again_is_no_useful_work() -> None:
    submit = submit_of("a", "bulk", BATCH, prompt_tokens=101, max_tokens=2)
    timeline = Timeline({RequestId("a"): Arrival(0, submit)}, TOY.cost)
    for start, count, at_us in ((0, 100, 0), (100, 1, 900_000), (0, 101, 1_000_000), (101, 1, 1_500_000)):
        timeline.step(plan(row("a", start, count)), StepResult(step=0, duration_us=9_000), at_us)
    cost = TOY.cost
    first_us = (cost.row_ns(0, 100) + cost.row_ns(100, 1)) // 1_000
    assert timeline.work_us(BATCH, 0, 1_000_000) == first_us
    assert timeline.work_us(BATCH, 1_000_000, 2_000_000) == cost.row_ns(101, 1) // 1_000
    assert [timeline.seconds[second].prefill[BATCH] for second in (0, 1)] == [100, 101]
    assert [timeline.seconds[second].decodes[BATCH] for second in (0, 1)] == [1, 1]
    assert timeline.step_us[9_000] == 4


class Services:
    """Stands in for an engine: who waits, and what each was charged."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def waiting_services(self, priority_class: PriorityClass) -> list[tuple[str, int]]:
        return list(self.of.items()) if priority_class is BATCH else []


def test_a_gap_counts_from_the_moment_both_wait_and_starts_anew_when_one_stops() -> None:
    gap, engine = FairnessGap(), Services()

    def look(**services: int) -> int:
        engine.of = services
        gap.look(engine)
        return gap.largest_us[BATCH]

    assert look(aurora=9_000, nova=0) == 0  # what was before does not count
    assert look(aurora=9_000, nova=700) == 700
    assert look(aurora=10_500, nova=700) == 1_500
    assert look(aurora=99_000) == 1_500
    assert look(aurora=99_000, nova=700) == 1_500
    assert look(aurora=99_000, nova=2_300) == 1_600


def test_the_bound_is_twice_the_gap_and_what_it_takes_to_drain_every_slot() -> None:
    policy = gpu_classes()[INTERACTIVE]  # B 1,000 ms, 16 steps
    assert gap_bound_us(policy, num_slots=8, longest_step_us=50_000) == 2 * (1_000_000 + 25 * 50_000)


def test_two_tenants_that_both_flood_stay_within_the_bound() -> None:
    arrivals = [
        Arrival(0, submit_of(f"{name}-{i}", name, BATCH, prompt_tokens=prompt, max_tokens=output))
        for name, prompt, output in (("aurora", 800, 4), ("nova", 16, 300))
        for i in range(40)
    ]
    outcome = Simulation(TOY, arrivals).run()
    longest_us = max(outcome.timeline.step_us)
    bound_us = gap_bound_us(TOY.classes[BATCH], num_slots=TOY.num_slots, longest_step_us=longest_us)
    assert 0 < outcome.gap.largest_us[BATCH] <= bound_us
