"""What the scheduler itself costs: CPU of a quiet step, an arrival, an abort, and a plan with victims.

The real engine, no executor: every row of a plan gets a made-up token, on a virtual clock that moves as the cost model
of an H200 with an 8B model says. Only this process's CPU time is counted, so a busy machine disturbs little.
``--rival`` runs another engine's scheduler beside it, and ``--stories`` tells both the same traffic.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import machine, quantile, report, say
from benchmarks.rival import SCRIPTS, RivalAbsent, medians, rows_table, running, told_to_both
from benchmarks.rival import quiet_steps as rival_steps
from gpu_worker.serving.garbage import keep_out_of_steps
from gpu_worker.simulation.stories import STORIES
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.events import Lever, StepEvents
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, gpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler

COST = CostConstants(
    base_ns=6_000_000,
    prefill_token_ns=45_000,
    prefill_context_ns=0,
    decode_row_ns=30_000,
    kv_token_ns=65,
    copy_operation_us=5,
    copy_bytes_per_us=50_000,
)
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 4_096
BLOCK_SIZE = 16
SHORT_OUTPUT_TOKENS = 512  # of those that shall give way: their memory of today is most of what they will ever need
NUM_VICTIMS = 16
PATIENCE_STEPS = 10
NUM_ABORTS = 1_000
ARRIVALS_A_STEP = 100
PROMPT = tuple(range(PROMPT_TOKENS))
MOST_RIVAL_WAITING, MOST_RIVAL_STEPS = 1_000, 300  # its quiet step does not depend on who waits, and lasts long
TOKEN = 7


@dataclass(frozen=True, slots=True)
class Step:
    """One plan and its application; times are CPU nanoseconds."""

    plan: StepPlan
    events: StepEvents
    plan_ns: int
    apply_ns: int

    @property
    def total_ns(self) -> int:
        return self.plan_ns + self.apply_ns


class Bench:
    """An engine with room for ``num_slots`` whole requests. Always: the virtual clock moves by each step's length."""

    def __init__(self, *, num_slots: int, num_blocks: int, num_host_blocks: int = 0) -> None:
        config = EngineConfig(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            max_model_len=10_000_000,  # one chat shall be able to want the memory of sixteen others
            block_size=BLOCK_SIZE,
        )
        self.engine = Scheduler(config, PolicySnapshot(version=0, classes=gpu_classes()), COST)
        self.now_us = 0
        self._num_requests = 0

    def request(
        self,
        tenant_id: str,
        priority_class: PriorityClass = PriorityClass.BATCH,
        *,
        prompt: Sequence[int] = PROMPT,
        max_tokens: int = OUTPUT_TOKENS,
    ) -> Request:
        self._num_requests += 1
        return Request(
            request_id=RequestId(f"request-{self._num_requests}"),
            tenant_id=tenant_id,
            priority_class=priority_class,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
        )

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.submit(request, self.now_us)

    def cancel(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self.engine.cancel(request_id, "client_gone", self.now_us)

    def step(self) -> Step:
        started = time.process_time_ns()
        plan = self.engine.plan_step(self.now_us)
        planned = time.process_time_ns()
        duration_us = _duration_us(plan)
        sampled = [TOKEN if row.samples else -1 for row in plan.rows]
        self.now_us += duration_us
        result = StepResult(step=plan.step, duration_us=duration_us, sampled_token_ids=sampled)
        computed = time.process_time_ns()
        events = self.engine.apply_step(result, self.now_us)
        return Step(plan, events, planned - started, time.process_time_ns() - computed)

    def fill(self, num_running: int) -> None:
        """Step until that many decode."""
        for _ in range(100 * num_running):
            rows = self.step().plan.rows
            if len(rows) == num_running and all(len(row.token_ids) == 1 for row in rows):
                return
        raise RuntimeError(f"{num_running} requests never ran together")


def _duration_us(plan: StepPlan) -> int:
    prefill = [row for row in plan.rows if len(row.token_ids) > 1]
    decodes = [row for row in plan.rows if len(row.token_ids) == 1]
    return COST.step_us(
        prefill_tokens=sum(len(row.token_ids) for row in prefill),
        prefill_context=0,
        decode_rows=len(decodes),
        kv_tokens=sum(row.start + 1 for row in decodes),
    )


def _timed(work: Callable[[], object]) -> int:
    started = time.process_time_ns()
    work()
    return time.process_time_ns() - started


def quiet_steps(num_running: int, num_waiting: int, num_tenants: int, num_steps: int) -> dict[str, Any]:
    """``num_running`` decode while ``num_waiting`` of their own class wait: nobody comes, goes or is pushed out.

    The arrivals before it and the aborts after it are counted in the steps that take them in, less a quiet step.
    """
    bench = Bench(num_slots=num_running, num_blocks=num_running * (OUTPUT_TOKENS + PROMPT_TOKENS) // BLOCK_SIZE * 2)
    bench.submit(bench.request(f"tenant-{number % num_tenants}") for number in range(num_running))
    bench.fill(num_running)
    before = [bench.step() for _ in range(20)]

    arrivals = [bench.request(f"tenant-{number % num_tenants}") for number in range(num_waiting)]
    submit_ns = _timed(lambda: bench.submit(arrivals))
    arrival_ns = submit_ns + bench.step().total_ns - (quantile([step.total_ns for step in before], 0.5) or 0)

    steps = [bench.step() for _ in range(num_steps)]
    quiet_ns = quantile([step.total_ns for step in steps], 0.5) or 0
    aborted = [request.request_id for request in arrivals[:: max(1, num_waiting // NUM_ABORTS)]]
    cancel_ns = _timed(lambda: bench.cancel(aborted))
    abort_ns = cancel_ns + bench.step().total_ns - quiet_ns
    bench.engine.check_books()
    return {
        "step_ms_p50": _ms(quantile([step.total_ns for step in steps], 0.5)),
        "step_ms_p99": _ms(quantile([step.total_ns for step in steps], 0.99)),
        "plan_ms_p50": _ms(quantile([step.plan_ns for step in steps], 0.5)),
        "plan_ms_p99": _ms(quantile([step.plan_ns for step in steps], 0.99)),
        "apply_ms_p50": _ms(quantile([step.apply_ns for step in steps], 0.5)),
        "apply_ms_p99": _ms(quantile([step.apply_ns for step in steps], 0.99)),
        "rows": len(steps[-1].plan.rows),
        "preemptions_in_quiet_steps": sum(len(step.events.preempted) for step in steps),
        "arrival_us": _us_each(arrival_ns, num_waiting),
        "abort_us": _us_each(abort_ns, len(aborted)),
    }


def crowded_steps(num_running: int, num_waiting: int, num_tenants: int) -> dict[str, Any]:
    """``num_running`` decode while ``num_waiting`` come, a hundred in each step: how long the longest step is."""
    bench = Bench(num_slots=num_running, num_blocks=num_running * (OUTPUT_TOKENS + PROMPT_TOKENS) // BLOCK_SIZE * 2)
    bench.submit(bench.request(f"tenant-{number % num_tenants}") for number in range(num_running))
    bench.fill(num_running)
    steps = []
    for first in range(0, num_waiting, ARRIVALS_A_STEP):
        coming = range(first, min(num_waiting, first + ARRIVALS_A_STEP))
        bench.submit(bench.request(f"tenant-{number % num_tenants}") for number in coming)
        steps.append(bench.step().total_ns)
    return {
        "crowded_step_ms_p50": _ms(quantile(steps, 0.5)),
        "crowded_step_ms_max": _ms(max(steps, default=None)),
    }


def abort_of_running(num_running: int) -> float | None:
    """Every second of those that run, in one step, with nobody waiting to take their place."""
    bench = Bench(num_slots=num_running, num_blocks=num_running * (OUTPUT_TOKENS + PROMPT_TOKENS) // BLOCK_SIZE * 2)
    requests = [bench.request("bulk") for _ in range(num_running)]
    bench.submit(requests)
    bench.fill(num_running)
    quiet_ns = quantile([bench.step().total_ns for _ in range(20)], 0.5) or 0
    aborted = [request.request_id for request in requests[::2]]
    cancel_ns = _timed(lambda: bench.cancel(aborted))
    return _us_each(max(0.0, cancel_ns + bench.step().total_ns - quiet_ns), len(aborted))


def plan_with_victims(num_running: int) -> dict[str, Any]:
    """Median of five fresh engines, for one such plan is all that each of them sees."""
    plans = [_one_plan_with_victims(num_running) for _ in range(5)]
    return {
        "victims": min(_num_victims(step) for step in plans),
        "victims_plan_ms_p50": _ms(quantile([step.plan_ns for step in plans], 0.5)),
        "victims_plan_ms_max": _ms(max(step.plan_ns for step in plans)),
    }


def _one_plan_with_victims(num_running: int) -> Step:
    """A chat whose prompt needs the memory of 16 running batch requests meets a pool that they fill."""
    pool = num_running * (PROMPT_TOKENS + SHORT_OUTPUT_TOKENS) // BLOCK_SIZE * 108 // 100
    bench = Bench(num_slots=num_running + 1, num_blocks=pool, num_host_blocks=pool)
    bench.submit(bench.request("bulk", max_tokens=SHORT_OUTPUT_TOKENS) for _ in range(num_running))
    bench.fill(num_running)
    blocks_each = len(bench.step().plan.rows[-1].block_table)
    wanted = bench.engine.load(bench.now_us).num_free_blocks + NUM_VICTIMS * blocks_each
    prompt = range((wanted - 1) * BLOCK_SIZE)
    chat = bench.request("aurora", PriorityClass.INTERACTIVE, prompt=prompt, max_tokens=16)
    bench.submit([chat])
    for _ in range(PATIENCE_STEPS):
        step = bench.step()
        if any(row.request_id == chat.request_id for row in step.plan.rows):
            bench.engine.check_books()
            return step
    raise RuntimeError(f"a chat was not let in within {PATIENCE_STEPS} steps")


def _num_victims(step: Step) -> int:
    """Who gave up memory; those that merely sat out a step for the chat's prompt are not meant."""
    return sum(preempted.lever is not Lever.HOLD for preempted in step.events.preempted)


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1_000_000, 4)


def _us_each(nanoseconds: float, number: int) -> float | None:
    return round(nanoseconds / 1_000 / number, 2) if number else None


def beside_rival(found: argparse.Namespace, stories: Sequence[str]) -> dict[str, Any]:
    """The keys ``rival`` (quiet steps) and ``rival_stories``; without a rival that runs ``rival`` is None, and standard
    error says why.
    """
    if found.rival_python is None:
        say("--rival skipped: --rival-python names no Python that has it")
        return {"rival": None}
    try:
        with running(found.rival, found.rival_python) as rival:
            waiting = min(found.waiting, MOST_RIVAL_WAITING)
            say(f"{found.rival} {rival.version}: quiet steps with {found.running} running, {waiting} waiting")
            steps = min(found.steps, MOST_RIVAL_STEPS)
            quiet = rival_steps(rival, running=found.running, waiting=waiting, steps=steps, prompt=PROMPT_TOKENS)
            told = {}
            for story in stories:
                seeds = [
                    told_to_both(rival, story, seed=seed, window_s=found.window_s) for seed in range(1, found.seeds + 1)
                ]
                told[story] = medians(seeds)
                say(rows_table(story, told[story]))
    except RivalAbsent as absent:
        say(f"--rival skipped: {absent}")
        return {"rival": None}
    return {
        "rival": {"name": found.rival, "version": rival.version, **quiet},
        **({"rival_stories": told} if told else {}),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=1_000, help="quiet steps that are timed")
    parser.add_argument("--rival", choices=sorted(SCRIPTS), help="another scheduler, measured in the same run")
    parser.add_argument("--rival-python", type=Path, metavar="PATH", help="a Python that can import it")
    parser.add_argument(
        "--stories", default="", metavar="NAMES", help="told to both, comma-separated: flood,long_decodes"
    )
    parser.add_argument("--seeds", type=int, default=1, help="of each story; medians are printed")
    parser.add_argument(
        "--window-s", type=int, default=240, help="how much of each story is told, in simulated seconds"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    stories = [name for name in found.stories.split(",") if name]
    if unknown := [name for name in stories if name not in STORIES]:
        parser.error(f"--stories: {unknown[0]} is none of {', '.join(sorted(STORIES))}")
    if min(found.running, found.tenants, found.steps, found.seeds, found.window_s) < 1 or found.waiting < 0:
        parser.error("--running, --tenants, --steps, --seeds and --window-s must be at least 1, --waiting at least 0")
    say(f"{found.steps} quiet steps with {found.running} running, {found.waiting} waiting, {found.tenants} tenants")
    result = {
        "bench": "scheduler",
        "running": found.running,
        "waiting": found.waiting,
        "tenants": found.tenants,
        "steps": found.steps,
        **quiet_steps(found.running, found.waiting, found.tenants, found.steps),
        **crowded_steps(found.running, found.waiting, found.tenants),
        "abort_running_us": abort_of_running(found.running),
        **plan_with_victims(max(found.running, 2 * NUM_VICTIMS)),
        **machine(),
    }
    if found.rival is not None:
        result |= beside_rival(found, stories)
    report(result, as_json=found.json)
    return 0


if __name__ == "__main__":
    keep_out_of_steps()  # as a worker does
    sys.exit(main())
