"""``python -m gpu_worker.simulate``: a story or a trace on a virtual clock, with the worker's own loop and engine.

Prints a table, and with ``--json`` one line at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_worker.config import ConfigError, positive, starting_policy
from gpu_worker.replay.recording import recorded_engine
from gpu_worker.simulated import DEVICES, DeviceProfile
from gpu_worker.simulation.compare import Comparison, only, spread_table
from gpu_worker.simulation.knobs import with_changes
from gpu_worker.simulation.plots import PlotError, draw_all, prepare
from gpu_worker.simulation.report import report, table
from gpu_worker.simulation.run import Outcome, Simulation
from gpu_worker.simulation.stories import STORIES, Story
from gpu_worker.simulation.traces import TraceError, TraceFile, read_traces, story_of
from gpu_worker.simulation.traffic import Arrival, Pace
from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import PolicySnapshot

_FIRST = "flood"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    found = parser.parse_args(arguments)
    for flag, other in _nothing_to_do(found):
        parser.error(f"{flag} does nothing {other}")
    device = DEVICES[found.device]
    try:
        policy = with_changes(starting_policy(found.policy, device.classes), found.set)
        name, story = _story(found, device)
        if found.plot is not None:
            prepare(found.plot)
    except (TraceError, PlotError, PolicyError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if found.compare:
        result = _compare(name, story, device, policy, range(found.seed, found.seed + found.seeds))
    else:
        arrivals = story.tell(found.seed, Pace(device))
        if found.alone is not None:
            arrivals = only(arrivals, found.alone)
            if not arrivals:
                parser.error(f"--alone: nobody in {name} has the class or tenant {found.alone!r}")
        result = _tell(name, arrivals, device, policy, found)
    if found.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.simulate", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--story", choices=sorted(STORIES), help=f"default: {_FIRST}")
    what.add_argument(
        "--trace",
        type=_trace_file,
        action="append",
        metavar="[CLASS=]FILE",
        help="a CSV of lengths (see traces/README.md) instead of a story; several are laid over each other",
    )
    parser.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="a trace's gaps are divided by this")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests of each trace")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200-8b")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", type=Path, metavar="FILE", help="a policy as JSON instead of the device's own")
    parser.add_argument(
        "--set", action="append", default=[], metavar="CLASS.FIELD=VALUE", help="change it, as all.fairness_gap_ms=500"
    )
    parser.add_argument("--alone", metavar="NAME", help="only the requests of this class or tenant")
    parser.add_argument("--noise-percent", type=_percent, default=0, metavar="N", help="step times vary by up to this")
    parser.add_argument(
        "--compare", action="store_true", help="also run its parts alone: ratios, targets met or missed"
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="with --compare: this many, from --seed on"
    )
    parser.add_argument("--trace-viewer", type=_new_file, metavar="FILE", help="for Perfetto or chrome://tracing")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="three pictures as PNG (needs matplotlib)")
    parser.add_argument(
        "--record", type=_folder, metavar="DIR", help="write down all that the engine is told, for replay"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def _trace_file(text: str) -> TraceFile:
    try:
        return TraceFile.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _new_file(text: str) -> Path:
    path = Path(text)
    try:
        path.touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def _folder(text: str) -> Path:
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def _percent(text: str) -> int:
    try:
        percent = int(text)
    except ValueError:
        percent = -1
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 100, not {text!r}")
    return percent


def _nothing_to_do(found: argparse.Namespace) -> list[tuple[str, str]]:
    """Flags that would be ignored: better said than left to be wondered at."""
    with_compare = [("--record", found.record), ("--trace-viewer", found.trace_viewer), ("--plot", found.plot)]
    ignored = [(flag, "beside --compare") for flag, value in with_compare if found.compare and value is not None]
    if found.compare and found.alone is not None:
        ignored.append(("--alone", "beside --compare"))
    if not found.compare and found.seeds != 1:
        ignored.append(("--seeds", "without --compare"))
    if not found.trace and (found.limit is not None or found.speed != 1.0):
        ignored.append(("--limit" if found.limit is not None else "--speed", "without --trace"))
    return ignored


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, not {text!r}")
    return value


def _story(found: argparse.Namespace, device: DeviceProfile) -> tuple[str, Story]:
    if not found.trace:
        name = found.story or _FIRST
        return name, STORIES[name]
    trace = read_traces(found.trace, device, speed=found.speed, limit=found.limit)
    if trace.num_cut:
        most = device.shape.max_model_len
        sys.stderr.write(f"{trace.num_cut} requests were cut to the device's context of {most} tokens\n")
    return "+".join(file.name for file in found.trace), story_of(trace)


def _tell(
    name: str, arrivals: Sequence[Arrival], device: DeviceProfile, policy: PolicySnapshot, found: argparse.Namespace
) -> dict[str, Any]:
    """One run, its table and its files."""
    with recorded_engine(found.record, name) as make_engine:
        simulation = Simulation(
            device,
            arrivals,
            policy=policy,
            noise_percent=found.noise_percent,
            seed=found.seed,
            with_viewer=found.trace_viewer is not None,
            make_engine=make_engine,
        )
        outcome = _run(simulation)
    result = report(outcome, story=name, seed=found.seed)
    sys.stdout.write(table(result) + "\n")
    if simulation.viewer is not None:
        simulation.viewer.write(found.trace_viewer)
    if found.plot is not None:
        draw_all(outcome, found.plot, f"{name} on {device.name}")
    return result


def _run(simulation: Simulation) -> Outcome:
    return simulation.run(show_progress=sys.stderr.isatty())


def _compare(
    name: str, story: Story, device: DeviceProfile, policy: PolicySnapshot, seeds: Sequence[int]
) -> dict[str, Any]:
    """Each seed beside its parts. The result is the first seed's, with ``comparison`` for all of them."""
    compared = [Comparison(name, story, device, policy, seed, _run) for seed in seeds]
    figures = [each.figures() for each in compared]
    sys.stdout.write(table(compared[0].result) + "\n\n" + spread_table(figures) + "\n")
    comparison = {
        column[0].name: {
            "values": [each.value for each in column],
            "target": column[0].target,
            "met": all(each.is_met for each in column),
        }
        for column in zip(*figures, strict=True)
    }
    return compared[0].result | {"comparison": comparison}


if __name__ == "__main__":
    sys.exit(main())
