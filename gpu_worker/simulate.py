"""``python -m gpu_worker.simulate``: the worker's own loop, engine and memory bus on a virtual clock.

Never a second scheduler: only the executor is a cost model. Prints a table, and with ``--json`` one line at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_worker.clock import VirtualClock
from gpu_worker.config import positive
from gpu_worker.loop import Turn, WorkerLoop
from gpu_worker.observer import Observer, quantiles_ms
from gpu_worker.simulated import BYTE_TOKENS, DEVICES, DeviceProfile, SimulatedExecutor
from gpu_worker.stories import STORIES, Arrival
from gpu_worker.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.policy import PolicySnapshot
from scheduler_engine.scheduler import Scheduler
from wire.memory_bus import MemoryHub
from wire.messages import Usage

FULL_CHECK_STEPS = 1_000
PROGRESS_STEPS = 200
WORKER_ID, GATEWAY_ID = "simulated", "simulator"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulation that has run to its end."""

    observer: Observer
    telemetry: Telemetry
    usages: Sequence[Usage]
    step_us: Counter[int]
    virtual_us: int
    cpu_s: float


class Simulation:
    """One worker and its arrivals. Always: the clock moves by steps, and to the next arrival or timer when idle."""

    def __init__(
        self, device: DeviceProfile, arrivals: Sequence[Arrival], *, noise_percent: int = 0, seed: int = 0
    ) -> None:
        self.observer = Observer()
        self._arrivals = arrivals
        self._next_arrival = 0
        self._clock = VirtualClock()
        hub = MemoryHub(self._clock.now_us, max_stream_length=10_000_000)
        self._hub = hub
        self._worker_bus, self._gateway_bus = hub.worker(WORKER_ID), hub.gateway(GATEWAY_ID)
        self._telemetry = Telemetry()
        policy = PolicySnapshot(version=0, classes=device.classes)
        self.scheduler = Scheduler(device.engine_config(), policy, device.cost)
        self._loop = WorkerLoop(
            identity=WorkerIdentity(
                worker_id=WORKER_ID,
                epoch=self._worker_bus.open(),
                model="simulated",
                max_model_len=device.shape.max_model_len,
            ),
            scheduler=self.scheduler,
            executor=SimulatedExecutor(device, self._clock, noise_percent=noise_percent, seed=seed),
            clock=self._clock,
            token_bytes=BYTE_TOKENS,
            telemetry=self._telemetry,
        )

    def run(self, *, show_progress: bool = False) -> Outcome:
        """To the last token. Raises BrokenBooks."""
        began_s = time.process_time()
        step_us: Counter[int] = Counter()
        num_turns = 0
        while self._next_arrival < len(self._arrivals) or self._loop.has_work:
            self._deliver_arrivals()
            started_us = self._clock.now_us()
            turn = self._loop.turn()
            self._hear(turn)
            if turn.is_idle:
                self._skip_to_next(turn)
            else:
                step_us[self._clock.now_us() - started_us] += 1
            self._loop.check_totals()
            num_turns += 1
            if num_turns % FULL_CHECK_STEPS == 0:
                self._loop.check_books()
            if show_progress and num_turns % PROGRESS_STEPS == 0:
                self._show_progress()
        self._loop.check_books()
        if show_progress:
            sys.stderr.write("\n")
        usages = [entry.message for entry in self._hub.usage if isinstance(entry.message, Usage)]
        cpu_s = time.process_time() - began_s
        return Outcome(self.observer, self._telemetry, usages, step_us, self._clock.now_us(), cpu_s)

    def _deliver_arrivals(self) -> None:
        now_us, first = self._clock.now_us(), self._next_arrival
        while self._next_arrival < len(self._arrivals) and self._arrivals[self._next_arrival].at_us <= now_us:
            arrival = self._arrivals[self._next_arrival]
            self.observer.expect(arrival)
            self._gateway_bus.send_now(WORKER_ID, arrival.submit)
            self._next_arrival += 1
        if self._next_arrival > first:
            due = self._arrivals[first : self._next_arrival]
            for arrival, message in zip(due, self._worker_bus.receive(0), strict=True):
                assert message is arrival.submit
                self._loop.take_in(arrival.submit, arrival.at_us)

    def _hear(self, turn: Turn) -> None:
        if not turn.output.is_empty:
            self._worker_bus.publish(turn.output)
            self.observer.take(self._gateway_bus.receive_now(), self._clock.now_us())

    def _skip_to_next(self, turn: Turn) -> None:
        times = [] if turn.wake_at_us is None else [turn.wake_at_us]
        if self._next_arrival < len(self._arrivals):
            times.append(self._arrivals[self._next_arrival].at_us)
        if not times:
            raise AssertionError(f"{self.observer.num_open} responses wait and nothing will ever wake the engine")
        self._clock.sleep_us(max(1, min(times) - self._clock.now_us()))

    def _show_progress(self) -> None:
        ended = sum(view.completed + view.shed for view in self.observer.classes.values())
        filled = 30 * ended // len(self._arrivals)
        seconds = self._clock.now_us() // 1_000_000
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\r[{bar}] {ended}/{len(self._arrivals)} responses, {seconds} s simulated")
        sys.stderr.flush()


def report(outcome: Outcome, *, story: str, device: str, seed: int) -> dict[str, Any]:
    """The JSON line. ``cpu_s`` is this process's CPU time; every other duration is virtual."""
    virtual_s = outcome.virtual_us / 1_000_000
    preemptions: Counter[str] = Counter()
    for counters in outcome.telemetry.classes.values():
        for (lever, _), count in counters.preemptions.items():
            preemptions[lever] += count
    tenants: dict[str, dict[str, float]] = {}
    for usage in outcome.usages:
        row = tenants.setdefault(usage.tenant_id, {"gpu_s": 0.0, "tokens": 0})
        row["gpu_s"] += usage.counters.gpu_us / 1_000_000
        row["tokens"] += usage.prompt_tokens + usage.output_tokens
    return {
        "story": story,
        "device": device,
        "seed": seed,
        "virtual_s": round(virtual_s, 3),
        "cpu_s": round(outcome.cpu_s, 2),
        "steps": outcome.step_us.total(),
        "step_ms": quantiles_ms(outcome.step_us),
        "classes": {
            priority_class.label: {
                "requests": view.requests,
                "completed": view.completed,
                "shed": view.shed,
                "tokens": view.tokens,
                "tokens_per_s": round(view.tokens / virtual_s, 1) if virtual_s else 0.0,
                "ttft_ms": quantiles_ms(view.ttft),
                "itl_ms": quantiles_ms(view.gaps),
                "queue_wait_ms": quantiles_ms(view.queue_wait),
            }
            for priority_class, view in outcome.observer.classes.items()
            if view.requests
        },
        "tenants": tenants,
        "preemptions": dict(sorted(preemptions.items())),
        "recomputed_tokens": sum(usage.counters.recomputed_tokens for usage in outcome.usages),
        "books_balanced": True,  # the run raises otherwise
    }


def table(result: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"{result['story']} on {result['device']}, seed {result['seed']}: {result['steps']} steps, "
        f"{result['virtual_s']:.0f} s simulated in {result['cpu_s']} s of CPU",
        f"{'class':<12}{'requests':>9}{'done':>7}{'shed':>6}{'tokens/s':>10}"
        f"{'TTFT p50':>14}{'p99':>14}{'max':>14}{'ITL p99':>10}",
    ]
    for label, row in result["classes"].items():
        ttft, itl = row["ttft_ms"], row["itl_ms"]
        cells = [_ms(ttft["p50"]), _ms(ttft["p99"]), _ms(ttft["max"]), _ms(itl["p99"])]
        lines.append(
            f"{label:<12}{row['requests']:>9}{row['completed']:>7}{row['shed']:>6}{row['tokens_per_s']:>10}"
            f"{cells[0]:>14}{cells[1]:>14}{cells[2]:>14}{cells[3]:>10}"
        )
    levers = ", ".join(f"{count} by {lever}" for lever, count in result["preemptions"].items()) or "none"
    lines.append(f"preemptions: {levers}; {result['recomputed_tokens']} tokens recomputed; books balanced")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.simulate", description=__doc__)
    parser.add_argument("--story", choices=sorted(STORIES), default="flood")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200-8b")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise-percent", type=positive, default=0, metavar="N", help="step times vary by up to this")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    simulation = Simulation(
        DEVICES[found.device], STORIES[found.story](found.seed), noise_percent=found.noise_percent, seed=found.seed
    )
    outcome = simulation.run(show_progress=sys.stderr.isatty())
    result = report(outcome, story=found.story, device=found.device, seed=found.seed)
    sys.stdout.write(table(result) + "\n")
    if found.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
