"""``python -m gpu_worker.replay LOG``: does the engine decide again what it decided; with ``--policy``, what if not.

Status 0: every step is as it was recorded (or the what-if has been answered); 1: a step is not; 2: the log, the policy
or the command line cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_worker.config import ConfigError, positive, starting_policy
from gpu_worker.replay.checkpoint import fingerprint
from gpu_worker.replay.record_log import LogError, LogFile, Stepped, log_starts
from gpu_worker.replay.rerun import NONSENSE, Diverged, Listener, replay
from gpu_worker.replay.side_by_side import RunLost
from gpu_worker.replay.what_if import DRAWS, comparison, what_if
from gpu_worker.serving.outage import say
from scheduler_engine.events import StepEvents
from scheduler_engine.explain import Explanation
from scheduler_engine.plan import StepPlan
from scheduler_engine.policy import gpu_classes
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler

DIVERGED, UNUSABLE = 1, 2


class ProgressBar:
    """On a terminal a bar, for a program lines of JSON, else nothing. Always: at most a hundred of them are drawn."""

    def __init__(self, as_lines: bool) -> None:
        self._as_lines = as_lines
        self._is_shown = sys.stderr.isatty() and not as_lines
        self._drawn = -1

    def show(self, doing: str, done: float) -> None:
        percent = int(100 * done)
        if self._as_lines and percent != self._drawn:
            self._drawn = percent
            sys.stderr.write(json.dumps({"doing": doing, "percent": percent}) + "\n")
            sys.stderr.flush()
        if self._is_shown and percent != self._drawn:
            self._drawn = percent
            filled = 30 * percent // 100
            sys.stderr.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {percent:3} % {doing}\033[K")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._is_shown:
            sys.stderr.write("\r\033[K")


class _Witness(Listener):
    """Asks why a request waited when it ends; later the engine may have forgotten it."""

    def __init__(self, request_id: RequestId) -> None:
        self._request_id = request_id
        self.explanation: Explanation | None = None

    def applied(self, plan: StepPlan, events: StepEvents, entry: Stepped, engine: Scheduler) -> None:
        ended = [end.request_id for end in events.finished] + [end.request_id for end in events.rejected]
        if self._request_id in ended:
            self.explanation = engine.explain(self._request_id)


def _replay(files: Sequence[LogFile], request_id: str | None, bar: ProgressBar) -> dict[str, Any]:
    witness = _Witness(RequestId(request_id or ""))
    found = replay(files, witness, lambda done, total: bar.show("replaying", done / total))
    result: dict[str, Any] = {
        "files": [str(file.path) for file in files],
        "steps": found.num_steps - files[0].boot().step,
        "digest": found.digest,
        "equal": True,
        "cut": found.is_cut,
    }
    if request_id is not None:
        explanation = witness.explanation or found.engine.explain(RequestId(request_id))
        if explanation is None:
            raise LogError(
                f"{files[0].path} knows no request {request_id!r}, or has it only in files that are gone or of before"
            )
        result["explanation"] = explained(explanation)
    return result


def explained(explanation: Explanation) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "request_id": explanation.request_id,
        "tenant_id": explanation.tenant_id,
        "priority_class": explanation.priority_class.label,
        "outcome": explanation.outcome,
        "text": explanation.text,
        "total_us": explanation.total_us,
        "queue_us": explanation.queue_us,
        "paused_us": explanation.paused_us,
        "ttft_us": explanation.ttft_us,
        "waits": [
            {
                "phase": phase,
                "cause": share.cause.label,
                "held_by": None if share.holder is None else share.holder.label,
                "us": share.duration_us,
            }
            for phase, shares in (("queued", explanation.queued), ("paused", explanation.paused))
            for share in shares
        ],
        "timeline": [{"at_us": entry.at_us, "text": entry.text} for entry in explanation.timeline],
        "is_whole": explanation.is_whole,
    }


def _told(result: dict[str, Any]) -> str:
    """The outcome of a replay, for a person."""
    lines = [f"{result['steps']} steps decided again as they were recorded; digest {result['digest']}"]
    if result["cut"]:
        lines.append("the log ends in the middle: its process died, or is still writing")
    if "explanation" in result:
        explanation = result["explanation"]
        lines.append(f"{explanation['request_id']} ({explanation['tenant_id']}): {explanation['text']}")
        lines += [f"  {entry['at_us'] / 1_000:10,.1f} ms  {entry['text']}" for entry in explanation["timeline"]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.replay", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="a recorded log, or the folder that a worker records to")
    parser.add_argument(
        "--minutes",
        type=positive,
        metavar="M",
        help="of a folder, hardly more than the last so many; with --policy also from before the worker's last start",
    )
    parser.add_argument("--explain", metavar="REQUEST", help="why this request waited")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="what the traffic would have met under this policy")
    parser.add_argument(
        "--draws", type=positive, default=DRAWS, metavar="N", help=f"of the noise, with --policy (default: {DRAWS})"
    )
    parser.add_argument("--seconds", type=positive, metavar="S", help="begin no further draw after this long")
    parser.add_argument(
        "--processes",
        type=positive,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="at once, with --policy: halves of the log, then runs that might have been (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--progress", action="store_true", help="a line of JSON on stderr for each percent done")
    found = parser.parse_args(arguments)
    if found.policy is None and (found.draws != DRAWS or found.seconds is not None):
        parser.error(f"{'--seconds' if found.draws == DRAWS else '--draws'} does nothing without --policy")
    if found.policy is not None and found.explain is not None:
        parser.error("--explain does nothing beside --policy")
    bar = ProgressBar(found.progress)
    try:
        starts = log_starts(found.log, found.minutes)
        files = starts[-1]
        recorded_by = files[0].boot().engine
        if recorded_by != fingerprint():
            say(f"recorded by engine {recorded_by}, and this is engine {fingerprint()}: differences may be meant")
        if found.policy is None:
            result = _replay(files, found.explain, bar)
            text = _told(result)
        else:
            policy = starting_policy(found.policy, gpu_classes())
            limits = {"draws": found.draws, "seconds": found.seconds, "processes": found.processes}
            result = what_if(starts, policy, **limits, progress=bar.show)
            text = comparison(result)
    except Diverged as error:
        bar.clear()
        difference = error.difference
        result = {"equal": False, "step": difference.step, "reason": difference.reason}
        for side, record in (("recorded", difference.recorded), ("replayed", difference.found)):
            result[side] = None if record is None else record._asdict()
        sys.stdout.write(f"{difference}\n" + (json.dumps(result) + "\n" if found.json else ""))
        return DIVERGED
    except (LogError, ConfigError, RunLost) as error:
        bar.clear()
        say(f"gpu_worker.replay: {error}")
        return UNUSABLE
    except NONSENSE as error:
        bar.clear()
        say(f"gpu_worker.replay: {found.log} holds what no engine wrote: {type(error).__name__}: {error}")
        return UNUSABLE
    bar.clear()
    sys.stdout.write(text + "\n")
    if found.json:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
