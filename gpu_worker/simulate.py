"""``python -m gpu_worker.simulate``: a story on a virtual clock, with the worker's own loop and engine.

Prints a table, and with ``--json`` one line at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from gpu_worker.config import positive
from gpu_worker.simulated import DEVICES, DeviceProfile
from gpu_worker.simulation.compare import Comparison, only, spread_table
from gpu_worker.simulation.report import report, table
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.stories import STORIES
from gpu_worker.simulation.traffic import Pace


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.simulate", description=__doc__)
    parser.add_argument("--story", choices=sorted(STORIES), default="flood")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200-8b")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", metavar="NAME", help="only the requests of this class or tenant")
    parser.add_argument("--noise-percent", type=positive, default=0, metavar="N", help="step times vary by up to this")
    parser.add_argument(
        "--compare", action="store_true", help="also run its parts alone: ratios, and targets met or missed"
    )
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="with --compare: this many, from --seed on"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    device = DEVICES[found.device]
    if found.compare:
        return compare(found.story, device, range(found.seed, found.seed + found.seeds), as_json=found.json)
    arrivals = STORIES[found.story].tell(found.seed, Pace(device))
    if found.alone is not None:
        arrivals = only(arrivals, found.alone)
        if not arrivals:
            parser.error(f"--alone: nobody in {found.story} has the class or tenant {found.alone!r}")
    simulation = Simulation(device, arrivals, noise_percent=found.noise_percent, seed=found.seed)
    outcome = simulation.run(show_progress=sys.stderr.isatty())
    result = report(outcome, story=found.story, seed=found.seed)
    sys.stdout.write(table(result) + "\n")
    if found.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


def compare(story: str, device: DeviceProfile, seeds: Sequence[int], *, as_json: bool) -> int:
    """A story of each seed beside its parts. The JSON line is the first seed's, with ``comparison`` for all seeds."""
    compared = [Comparison(story, device, seed) for seed in seeds]
    figures = [each.figures() for each in compared]
    sys.stdout.write(table(compared[0].result) + "\n\n" + spread_table(figures) + "\n")
    if as_json:
        comparison = {
            column[0].name: {
                "values": [each.value for each in column],
                "target": column[0].target,
                "met": all(each.is_met for each in column),
            }
            for column in zip(*figures, strict=True)
        }
        sys.stdout.write(json.dumps(compared[0].result | {"comparison": comparison}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
