"""The state machine of a request, edge by edge: none that is not drawn, and each that is drawn is walked."""

from __future__ import annotations

import random

from scheduler_engine.live import State
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler
from tests.scheduler_engine.world import BATCH, DEFAULT, INTERACTIVE, World, policy

GONE = None
Edge = tuple[State, State | None]

_OUT = (State.HELD, State.ON_HOST, State.SAVING, State.DROPPED)
BY_A_PLAN: set[Edge] = {
    (State.WAITING, State.PREFILL),
    *((State.PREFILL, out) for out in _OUT),
    *((State.DECODE, out) for out in _OUT),
    (State.HELD, State.PREFILL),
    (State.HELD, State.DECODE),
    (State.HELD, State.ON_HOST),
    (State.HELD, State.SAVING),
    (State.HELD, State.DROPPED),
    (State.ON_HOST, State.PREFILL),
    (State.ON_HOST, State.DECODE),
    (State.DROPPED, State.PREFILL),
    *((state, GONE) for state in State),  # cancelled, or shed while it waited
}
BY_A_RESULT: set[Edge] = {
    (State.PREFILL, State.DECODE),
    (State.PREFILL, State.DROPPED),  # its row failed
    (State.PREFILL, GONE),
    (State.DECODE, State.DROPPED),
    (State.DECODE, GONE),
    (State.SAVING, State.ON_HOST),
}


class Watched(Scheduler):
    """A Scheduler whose requests are looked at before and after each verb."""

    walked_by_plans: set[Edge]
    walked_by_results: set[Edge]

    def _states(self) -> dict[RequestId, State]:
        return {request_id: live.state for request_id, live in self._state.lives.items()}

    @staticmethod
    def _edges(before: dict[RequestId, State], after: dict[RequestId, State]) -> set[Edge]:
        return {(state, after.get(i)) for i, state in before.items() if after.get(i) is not state}

    def plan_step(self, now_us: int) -> StepPlan:
        before = self._states()
        plan = super().plan_step(now_us)
        self.walked_by_plans |= self._edges(before, self._states())
        return plan

    def apply_step(self, result: StepResult, now_us: int):  # type: ignore[no-untyped-def]
        before = self._states()
        events = super().apply_step(result, now_us)
        self.walked_by_results |= self._edges(before, self._states())
        return events


def a_short_life(seed: int, walked: tuple[set[Edge], set[Edge]]) -> None:
    """Forty steps of trouble on a tiny device, another one for each seed."""
    rng = random.Random(seed)
    world = World(
        rng.choice((12, 20, 40)),
        rng.choice((1, 2, 3)),
        rng.choice((16, 64)),
        policy=policy(chunk_min=8, quantum_steps=2, fairness_gap_ms=rng.choice((20, 1_000)), cap_memory_percent=100),
        num_host_blocks=rng.choice((0, 6, 60)),
        copies_in_order=rng.random() < 0.5,
        copy_steps=3,
        check=False,
    )
    world.engine = Watched(world.config, world.policy, world.cost)
    world.engine.walked_by_plans, world.engine.walked_by_results = walked
    for _ in range(40):
        if rng.random() < 0.35:
            world.submit(
                rng.choice((INTERACTIVE, DEFAULT, BATCH, BATCH)),
                rng.randint(1, 150),
                rng.randint(1, 40),
                tenant=rng.choice(("Aurora", "Bulk", "Nova")),
                reproducible=rng.random() < 0.3,
                hard_deadline_us=rng.choice((None, None, 60_000)),
            )
        unfinished = world.unfinished()
        if unfinished and rng.random() < 0.08:
            world.cancel(rng.choice(unfinished))
        if unfinished and rng.random() < 0.05:
            name = rng.choice(unfinished)
            world.fail_next[name] = RowFailure(RequestId(name), "not_finite", poison=rng.random() < 0.3)
        world.run_step()
        world.engine.check_books()
    world.finish()


def test_every_edge_of_the_state_machine_is_walked_and_no_other() -> None:
    walked: tuple[set[Edge], set[Edge]] = (set(), set())
    for seed in range(400):
        a_short_life(seed, walked)
        if walked == (BY_A_PLAN, BY_A_RESULT):
            break
    assert walked[0] - BY_A_PLAN == set(), "by a plan"
    assert walked[1] - BY_A_RESULT == set(), "by a result"
    assert BY_A_PLAN - walked[0] == set(), "not walked by any plan"
    assert BY_A_RESULT - walked[1] == set(), "not walked by any result"
