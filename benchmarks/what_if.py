"""How wrong a what-if is: a busy minute on a noisy device, recorded, and its own policy asked of the log.

The noise is another one for each seed, the traffic is the same. Simulated durations only.

With ``--preview TRACE`` how long the policy desk's preview of a trace takes on this machine: recorded as a worker
records it, a file each two minutes, and replayed by the very program that the desk starts. Real seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import machine, report, say
from gateway.desk.replaying import HOUR, NICE, command
from gpu_worker.clock import VirtualClock
from gpu_worker.config import positive
from gpu_worker.replay.recording import recorded_engine
from gpu_worker.replay.what_if import DRAWS, what_if
from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.traces import TraceFile, read_traces
from gpu_worker.simulation.traffic import SECOND_US, Arrival, submit_of
from scheduler_engine.policy import PolicySnapshot, PriorityClass, snapshot_to_dict
from wire.messages import Submit

DEVICE = DEVICES["h200-8b"]
CLASS = "interactive"
_LEAST_SECONDS = 10
_LOOK_S = 0.25


def arrivals(seed: int, seconds: int) -> list[Arrival]:
    """Bulk's batches lie there from the start, and Aurora and Nova send 14 chats a second, as they come."""
    rng = random.Random(seed)
    found = [
        Arrival(0, _ask(rng, f"bulk-{i}", "bulk", PriorityClass.BATCH, 64 * rng.randint(16, 48)))
        for i in range(2 * seconds)
    ]
    at_us = SECOND_US
    while at_us < seconds * SECOND_US:
        at_us += round(rng.expovariate(1 / (SECOND_US // 14)))
        tenant_id = rng.choice(("aurora", "nova"))
        chat = _ask(rng, f"chat-{len(found)}", tenant_id, PriorityClass.INTERACTIVE, 32 * rng.randint(1, 40))
        found.append(Arrival(at_us, chat))
    return found


def _ask(rng: random.Random, name: str, tenant_id: str, priority_class: PriorityClass, prompt_tokens: int) -> Submit:
    output = 200 if priority_class is PriorityClass.BATCH else 8 * rng.randint(2, 12)
    return submit_of(name, tenant_id, priority_class, prompt_tokens=prompt_tokens, max_tokens=output)


class Answer(NamedTuple):
    """One figure of one log: what happened, and what the what-if made of it."""

    happened: float
    model: float
    least: float
    most: float

    @property
    def error_percent(self) -> float:
        return round(100 * (self.model - self.happened) / self.happened, 1) if self.happened else 0.0

    @property
    def is_inside(self) -> bool:
        """Of the draws' range."""
        return self.least <= self.happened <= self.most


class Answers(NamedTuple):
    """Of one log, in milliseconds."""

    chats: int
    ttft_p99: Answer
    fairness_gap: Answer


def asked(seconds: int, *, noise_percent: int, seed: int, draws: int) -> Answers:
    """Record a run and ask what its own policy would have done. ``seed`` is of the noise."""
    with tempfile.TemporaryDirectory(prefix="what-if-") as folder:
        with recorded_engine(Path(folder), DEVICE.name) as make_engine:
            simulation = Simulation(
                DEVICE, arrivals(1, seconds), noise_percent=noise_percent, seed=seed, make_engine=make_engine
            )
            simulation.run(show_progress=sys.stderr.isatty())
        result = what_if(Path(folder), None, draws=draws)
    happened, model = result["happened"], result["model"]
    real, made = happened["classes"][CLASS], model["classes"][CLASS]
    ttft = Answer(real["ttft_ms"]["p99"], made["ttft_ms"]["p99"], *made["spread"]["ttft_p99"])
    gap_ms, gaps = happened["fairness_gap_ms"][CLASS], model["fairness_gap_spread_ms"][CLASS]
    return Answers(real["requests"], ttft, Answer(gap_ms, model["fairness_gap_ms"][CLASS], *gaps))


def _rows(answers: Sequence[Answers], name: str) -> Iterator[str]:
    found: list[Answer] = [getattr(each, name) for each in answers]
    for seed, each in enumerate(found, start=1):
        yield (
            f"{seed:>4}{each.happened:>12,.0f} ms{each.model:>12,.0f} ms{each.least:>12,.0f} … {each.most:<10,.0f}"
            f"{each.error_percent:>+8.1f} %"
        )


def summary(answers: Sequence[Answers], name: str) -> dict[str, float]:
    """Of one figure over the seeds."""
    found: list[Answer] = [getattr(each, name) for each in answers]
    errors = [abs(each.error_percent) for each in found]
    return {
        "error_percent_median": statistics.median(errors),
        "error_percent_most": max(errors),
        "inside_the_draws": sum(each.is_inside for each in found),
        "happened_ms_least": min(each.happened for each in found),
        "happened_ms_most": max(each.happened for each in found),
    }


def previewed(trace: Path, limit: int | None) -> dict[str, object]:
    """Real seconds and memory of the desk's default preview, under an edit of batch alone, and its error bar."""
    with tempfile.TemporaryDirectory(prefix="what-if-") as scratch:
        folder, policy = Path(scratch) / "recorded", Path(scratch) / "policy.json"
        clock = VirtualClock()
        with recorded_engine(folder, DEVICE.name, lambda: clock.now_us() / SECOND_US) as make_engine:
            found = read_traces([TraceFile(trace)], DEVICE, limit=limit).arrivals
            simulation = Simulation(DEVICE, found, make_engine=make_engine, clock=clock)
            simulation.run(show_progress=sys.stderr.isatty())
        interactive, default, batch = DEVICE.classes
        edit = PolicySnapshot(version=1, classes=(interactive, default, replace(batch, floor_percent=0)))
        policy.write_text(json.dumps(snapshot_to_dict(edit)), encoding="utf-8")
        num_files = len(list(folder.iterdir()))
        say(f"recorded {num_files} files")
        began_s = time.monotonic()
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command(folder, policy, HOUR), start_new_session=True, **told) as process:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
            memory = MemoryWatch(process.pid)
            said, wrong = process.communicate()
            seconds = time.monotonic() - began_s
    if process.returncode:
        raise SystemExit(f"the preview failed: {wrong.decode().splitlines()[-1]}")
    result = json.loads(said.splitlines()[-1])
    return {
        "requests": len(found),
        "traffic_s": result["seconds"],
        "files": num_files,
        "steps": result["steps"],
        "passes": 1 + 2 * result["draws"],
        "seconds": round(seconds, 1),
        "peak_mib": memory.stop(),
        "error_percent": result["error_percent"],
        **machine(),
    }


class MemoryWatch:
    """The most memory that a session's processes had together, each shared page counted once; 0 where no /proc is."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._most_kib = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._most_kib = max(self._most_kib, sum(map(self._proportional_kib, Path("/proc").glob("[0-9]*"))))

    def _proportional_kib(self, process: Path) -> int:
        try:
            if os.getsid(int(process.name)) != self._session:
                return 0
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def stop(self) -> int:
        """In MiB."""
        self._is_over.set()
        self._thread.join()
        return self._most_kib >> 10


def _enough(text: str) -> int:
    """An argparse type: seconds in which a hundred chats come."""
    seconds = positive(text)
    if seconds < _LEAST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be {_LEAST_SECONDS} or more: fewer chats have no 99th percentile")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.what_if", description=__doc__)
    parser.add_argument("--seconds", type=_enough, default=60, help="of traffic (default: 60)")
    parser.add_argument("--noise-percent", type=positive, default=25)
    parser.add_argument("--seeds", type=positive, default=4, help="of the noise (default: 4)")
    parser.add_argument("--draws", type=positive, default=DRAWS, help=f"of each what-if (default: {DRAWS})")
    parser.add_argument("--preview", type=Path, metavar="TRACE", help="time the desk's preview of this trace instead")
    parser.add_argument("--limit", type=positive, metavar="N", help="with --preview: the first N requests only")
    parser.add_argument("--json", action="store_true")
    found = parser.parse_args(arguments)
    if found.preview is not None:
        report(previewed(found.preview, found.limit), as_json=found.json)
        return 0
    if found.limit is not None:
        parser.error("--limit does nothing without --preview")
    answers = []
    for seed in range(1, found.seeds + 1):
        say(f"noise {seed}")
        answers.append(asked(found.seconds, noise_percent=found.noise_percent, seed=seed, draws=found.draws))
    if not found.json:
        for name in ("ttft_p99", "fairness_gap"):
            sys.stdout.write(f"{CLASS} {name}: noise, happened, what-if, its draws, error\n")
            sys.stdout.write("\n".join(_rows(answers, name)) + "\n")
    told = {"chats": answers[0].chats, "ttft_p99": summary(answers, "ttft_p99")}
    report(told | {"fairness_gap": summary(answers, "fairness_gap")}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
