"""The simulator's tables of docs/performance.md and docs/operations.md, in Markdown: stories, traces and knobs.

Simulated durations only: they are the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import say
from gpu_worker.config import positive
from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.compare import Comparison, Figure, only, spreads
from gpu_worker.simulation.knobs import with_changes
from gpu_worker.simulation.report import report
from gpu_worker.simulation.run import Outcome, Simulation
from gpu_worker.simulation.stories import STORIES
from gpu_worker.simulation.traces import TraceFile, read_traces, story_of
from gpu_worker.simulation.traffic import SECOND_US
from scheduler_engine.policy import PolicySnapshot

DEVICE = DEVICES["h200-8b"]
POLICY = PolicySnapshot(version=0, classes=DEVICE.classes)
TRACES = Path(__file__).resolve().parents[1] / "traces"


@dataclass(frozen=True, slots=True)
class Mix:
    """Traces laid over each other, and for how long. ``speed`` as in ``--speed``."""

    name: str
    files: Sequence[str]
    minutes: int
    speed: float = 1.0


MIXES = (
    Mix(
        "azure2023 conv + code + arxiv batch",
        ("azure2023_conv", "default=azure2023_code", "arxiv_summarization_lengths"),
        8,
    ),
    Mix("servegen m-large, one tenant floods", ("servegen_mlarge_1h",), 10),
    Mix("the same, twice as fast", ("servegen_mlarge_1h",), 5, speed=2.0),
    Mix("servegen r1", ("servegen_r1_1h",), 10),
    Mix("lmsys arena, 27 tenants, 8 times as fast", ("lmsys_arena_27tenants_10min",), 2, speed=8.0),
    Mix("mooncake conversation, half as fast", ("mooncake_conversation",), 5, speed=0.5),
    Mix("mooncake synthetic, half as fast", ("mooncake_synthetic",), 5, speed=0.5),
    Mix("offline job as default class", ("default=servegen_offline_d_sample160",), 5),
)

# (story, seconds of it, field, its values with the default in the middle where there is one, figures)
KNOBS: tuple[tuple[str, int, str, tuple[int, ...], tuple[str, ...]], ...] = (
    (
        "flood",
        120,
        "interactive.step_cap_percent",
        (5, 30, 50),
        ("interactive TTFT p99, ms", "batch work, share of batch alone"),
    ),
    (
        "flood",
        120,
        "interactive.tbt_target_ms",
        (25, 50, 150),
        ("interactive ITL p99, ms", "batch work, share of batch alone"),
    ),
    (
        "flood",
        120,
        "batch.token_budget_max",
        (1_024, 2_048, 8_192),
        ("interactive TTFT p99, ms", "batch work, share of batch alone"),
    ),
    (
        "tenant_flood",
        100,
        "interactive.max_queue_wait_ms",
        (2_000, 10_000, 60_000),
        ("TTFT p99 of all but nova, ms", "Retry-After kept, share"),
    ),
    (
        "long_decodes",
        120,
        "batch.cap_memory_percent",
        (60, 94, 100),
        ("interactive TTFT p99, ms", "batch work, share of batch alone"),
    ),
    (
        "long_decodes",
        120,
        "batch.cap_slots_percent",
        (50, 100),
        ("interactive TTFT p99, ms", "batch work, share of batch alone"),
    ),
)


def until(end_us: int | None) -> Callable[[Simulation], Outcome]:
    return lambda simulation: simulation.run(until_us=end_us, show_progress=sys.stderr.isatty())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines.extend("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join(lines) + "\n"


def stories(names: Sequence[str], num_seeds: int, *, until_s: int | None, num_jobs: int) -> Iterator[str]:
    """Each story over several seeds, against its targets."""
    first = "" if until_s is None else f"its first {until_s} s, "
    with ProcessPoolExecutor(num_jobs) as pool:
        told = {
            name: [pool.submit(_figures, name, seed, until_s) for seed in range(1, num_seeds + 1)] for name in names
        }
        for name, seeds in told.items():
            found = spreads([each.result() for each in seeds])
            rows = [(each.name, each.median, each.range, each.target, each.verdict) for each in found]
            yield f"`{name}`, {first}{num_seeds} seeds:\n\n" + markdown(
                ("", "median", "least … most", "target", ""), rows
            )


def _figures(name: str, seed: int, until_s: int | None) -> list[Figure]:
    say(f"{name}, seed {seed}")
    end_us = None if until_s is None else until_s * SECOND_US
    return Comparison(name, STORIES[name], DEVICE, POLICY, seed, until(end_us)).figures()


def traces() -> Iterator[str]:
    """Every mix: what each class met, beside what it meets alone; and tenants beside a loud one."""
    rows: list[list[str]] = []
    loud_rows: list[list[str]] = []
    for mix in MIXES:
        say(mix.name)
        end_us = mix.minutes * 60 * SECOND_US
        trace = read_traces([_file(name) for name in mix.files], DEVICE, speed=mix.speed)
        trace.arrivals[:] = [each for each in trace.arrivals if each.at_us < end_us]
        story = story_of(trace)
        outcome = until(end_us)(Simulation(DEVICE, trace.arrivals))
        result = report(outcome, story=mix.name, seed=0)
        for label, row in result["classes"].items():
            alone = "" if len(result["classes"]) == 1 else _alone_p99(trace.arrivals, label, end_us)
            rows.append([mix.name, label, *_cells(row), alone, str(result["preemptions"].get("swap", 0))])
        if story.loud_tenant is not None:
            figures = Comparison(mix.name, story, DEVICE, POLICY, 0, until(end_us)).figures()
            found = {figure.name: figure.value for figure in figures}
            loud = story.loud_tenant
            values = (
                found[f"TTFT p99 of all but {loud}, ms"],
                found[f"the same without {loud}, ms"],
                found["the same without isolation, ms"],
            )
            gap = result["fairness_gap_ms"]
            loud_rows.append(
                [mix.name, loud, *(_ms(value) for value in values), f"{_ms(gap['max'])} of {_ms(gap['bound'])}"]
            )
    yield markdown(
        (
            "trace",
            "class",
            "requests",
            "shed",
            "TTFT p50 ms",
            "p99 ms",
            "ITL p99 ms",
            "tokens/s",
            "TTFT p99 alone",
            "swaps",
        ),
        rows,
    )
    yield markdown(
        ("trace", "loud tenant", "TTFT p99 of the others, ms", "without it", "without isolation", "fairness gap, ms"),
        loud_rows,
    )


def _file(name: str) -> TraceFile:
    label, equals, stem = name.rpartition("=")
    return TraceFile.parse(f"{label}{equals}{TRACES / stem}.csv.gz")


def _alone_p99(arrivals: Sequence[Any], label: str, end_us: int) -> str:
    outcome = until(end_us)(Simulation(DEVICE, only(arrivals, label)))
    return _ms(report(outcome, story=label, seed=0)["classes"][label]["ttft_ms"]["p99"])


def _cells(row: dict[str, Any]) -> list[str]:
    ttft, itl = row["ttft_ms"], row["itl_ms"]
    numbers = [f"{row['requests']:,}", f"{row['shed']:,}", _ms(ttft["p50"]), _ms(ttft["p99"]), _ms(itl["p99"])]
    return [*numbers, f"{row['tokens_per_s']:,.0f}"]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def knobs() -> Iterator[str]:
    """One field at a time, everything else as it is by default."""
    rows = []
    for name, seconds, field, values, wanted in KNOBS:
        for value in values:
            say(f"{name}: {field}={value}")
            change = [f"{field}={value}", *_followers(field, value)]
            policy = with_changes(POLICY, change)
            comparison = Comparison(name, STORIES[name], DEVICE, policy, 1, until(seconds * SECOND_US))
            found = {figure.name: figure.value for figure in comparison.figures()}
            cells = [f"{figure}: {'-' if found[figure] is None else f'{found[figure]:,.3g}'}" for figure in wanted]
            rows.append([f"`{field}`", f"{value:,}", name, *cells])
    yield markdown(("field", "value", "story", "moves", "and"), rows)


def _followers(field: str, value: int) -> list[str]:
    """A budget below the chunk is refused: the chunk follows it."""
    label, _, name = field.partition(".")
    return [f"{label}.chunk_max={min(value, 1_024)}"] if name == "token_budget_max" else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stories", description=__doc__)
    parser.add_argument("--parts", default="stories,traces,knobs", help="comma-separated (default: all three)")
    parser.add_argument("--stories", default=",".join(STORIES), metavar="NAMES")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--until-s", type=positive, metavar="S", help="only the first S seconds of each story")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="stories in this many processes at once")
    found = parser.parse_args(arguments)
    names = found.stories.split(",")
    unknown = [name for name in names if name not in STORIES]
    if unknown or found.seeds < 1:
        parser.error(f"--stories: {unknown[0]} is none of {', '.join(STORIES)}" if unknown else "--seeds: at least 1")
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "stories": lambda: stories(names, found.seeds, until_s=found.until_s, num_jobs=found.jobs),
        "traces": traces,
        "knobs": knobs,
    }
    for part in found.parts.split(","):
        if part not in parts:
            parser.error(f"--parts: {part} is none of {', '.join(parts)}")
        for text in parts[part]():
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
