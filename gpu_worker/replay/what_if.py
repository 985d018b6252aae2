"""What the same traffic would have met under another policy: a recorded log, told to an engine with step times of a
fitted model.

Imports neither torch nor Django, so that a gateway may run it as a process. Its own error is part of the answer: the
recorded policy, run with the model, against what happened; and how far draws of the day's noise lie apart.
"""

from __future__ import annotations

import datetime
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_worker.replay.fitting import Load
from gpu_worker.replay.modelled import ModelledRun
from gpu_worker.replay.record_log import LogFile, log_starts
from gpu_worker.replay.rerun import engine_of
from gpu_worker.replay.side_by_side import Run, Show, side_by_side
from gpu_worker.replay.spread import middle
from gpu_worker.replay.starts import Start, looked_at
from gpu_worker.replay.tally import Tally
from scheduler_engine.policy import PolicySnapshot, snapshot_to_dict

DRAWS = 5

Progress = Callable[[str, float], None]  # what is being done, and how much of all is done, from 0 to 1


class Stopped(Exception):
    """The caller asked to stop."""


def what_if(
    log: Path | Sequence[Sequence[LogFile]],
    policy: PolicySnapshot | None,
    *,
    draws: int = DRAWS,
    seconds: float | None = None,
    processes: int = 1,
    progress: Progress = lambda doing, done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Runs of one log as plain data: ``happened``, ``model`` (the recorded policy, with the model's step times) and
    ``what_if``; ``error_percent`` is the model against what happened when the log ends. Runs that might have been then
    run on without new traffic, so that whoever waits long is seen to; rates count up to the log's end. ``unserved``:
    how many still waited for a first token then, whose times ``happened`` cannot know.

    ``model`` and ``what_if`` are medians over ``draws`` of the noise of the steps, the same for both, with the least
    and the most of them as ``spread``. No draw but the first is begun after ``seconds``. Without a policy there is no
    ``what_if``: only the error is asked for. With two ``processes`` or more the log is told in two halves, and so many
    runs are made at a time; what comes out is the same.

    Of a worker that was started anew (``log_starts``) each start is run by itself, and the figures are joined; a
    request that came again after a start counts there. ``starts_unix_us``: when that was; ``left_out``: what is on
    record of earlier starts and cannot be replayed.

    Raises LogError for a log that cannot be used, Diverged where this engine does not decide as the log's did, Stopped
    once ``should_stop`` says so (asked with every report of progress).
    """
    began_s = time.monotonic()
    policies = [None] if policy is None else [None, policy]
    bar = _Bar(policies, draws, seconds, processes, progress, should_stop)
    logs = log_starts(log) if isinstance(log, Path) else log
    starts, left_out = looked_at(logs, processes, bar.show_log)
    happened = Tally()
    for start in starts:
        happened.add(start.reality.tally)
    bar.begin_draws()

    def runs() -> Iterator[Run]:
        for draw in range(draws):
            if draw and seconds is not None and time.monotonic() - began_s > seconds:
                return
            for each in policies:
                yield functools.partial(_modelled, starts, each, draw)

    found: list[_Found] = side_by_side(runs(), processes, bar.show_run)
    progress("done", 1.0)
    models, others = found[:: len(policies)], found[len(policies) - 1 :: len(policies)]
    last = starts[-1].reality
    return {
        "log": [str(file.path) for start in starts for file in start.files],
        "starts_unix_us": [start.boot.started_unix_us for start in starts[1:]],
        "left_out": left_out,
        "policy": None if policy is None else snapshot_to_dict(policy),
        "seconds": happened.span_us // 1_000_000,
        "steps": happened.num_steps,
        "draws": len(models),
        "unserved": happened.num_unserved,
        "happened": happened.report(),
        "model": middle([each.report for each in models]),
        "what_if": None if policy is None else middle([each.report for each in others]),
        "error_percent": _errors(happened.report(), middle([each.at_the_end for each in models])),
        "assumed_lengths": found[-1].num_assumed,
        "step_model_us": dict(zip(Load._fields, (round(us, 6) for us in last.model.microseconds), strict=True)),
    }


class _Found(NamedTuple):
    """One run that might have been: when the log ends, and when nobody is left."""

    at_the_end: dict[str, Any]
    report: dict[str, Any]
    num_assumed: int


def _modelled(starts: Sequence[Start], policy: PolicySnapshot | None, draw: int, show: Show) -> _Found:
    at_the_end, after, num_assumed = Tally(), Tally(), 0
    for number, (files, boot, reality) in enumerate(starts):
        run = ModelledRun(boot, engine_of(boot, files[0]), reality, policy, reality.weather(draw))
        at_the_end.add(run.run(lambda done, number=number: show((number + min(1.0, done)) / len(starts))))  # type: ignore[misc]
        after.add(run.run_on())
        num_assumed += run.num_assumed
    return _Found(at_the_end.report(), after.report(), num_assumed)


class _Bar:
    """How much of all is done. Always: a run is taken to last as long as the first, and no draw to be begun too late;
    what is shown never falls.
    """

    def __init__(
        self,
        policies: Sequence[PolicySnapshot | None],
        draws: int,
        seconds: float | None,
        processes: int,
        progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._policies = policies
        self._draws, self._seconds = draws, seconds
        self._lasts = len(policies) / min(processes, len(policies))  # a draw, in times the first run
        self._progress = progress
        self._should_stop = should_stop
        self._began_s = time.monotonic()
        self._log_share = 1 / (1 + self._lasts)
        self._num_draws = 1
        self._done: dict[int, float] = {}

    def show_log(self, done: float) -> None:
        self._show("replaying what happened", self._log_share * min(1.0, done))

    def begin_draws(self) -> None:
        """What happened is known, and how long that took."""
        first_s = max(1e-3, time.monotonic() - self._began_s)
        left_s = first_s * self._lasts * self._draws if self._seconds is None else self._seconds - first_s
        self._num_draws = max(1, min(self._draws, math.ceil(left_s / (first_s * self._lasts))))

    def show_run(self, number: int, done: float) -> None:
        self._done[number] = min(1.0, done)
        share = sum(self._done.values()) / (len(self._policies) * self._num_draws)
        both = "" if len(self._policies) == 1 else " and under the other one"
        doing = f"the same traffic on the model, under the same policy{both}"
        self._show(doing, self._log_share + (1 - self._log_share) * min(1.0, share))

    def _show(self, doing: str, done: float) -> None:
        if self._should_stop():
            raise Stopped
        self._progress(doing, done)


def _errors(happened: dict[str, Any], model: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Of the model, class by class, in percent of what happened; None where nothing happened, or too little to say."""
    errors: dict[str, dict[str, float | None]] = {}
    for label, real in happened["classes"].items():
        made = model["classes"].get(label)
        if made is not None:
            errors[label] = {
                "ttft_p50": _percent(real["ttft_ms"]["p50"], made["ttft_ms"]["p50"]),
                "ttft_p99": _percent(real["ttft_ms"]["p99"], made["ttft_ms"]["p99"]),
                "tokens_per_s": _percent(real["tokens_per_s"], made["tokens_per_s"]),
                "fairness_gap": _percent(happened["fairness_gap_ms"][label], model["fairness_gap_ms"].get(label)),
            }
    return errors


def _percent(real: float | None, made: float | None) -> float | None:
    return None if not real or made is None else round(100 * (made - real) / real, 1)


def comparison(result: dict[str, Any]) -> str:
    """The three side by side, for a person: classes, then tenants."""
    runs = [("happened", result["happened"]), ("model", result["model"]), ("what if", result["what_if"])]
    columns = ("requests", 9), ("done", 7), ("refused", 8), ("open", 6), ("TTFT p50", 13), ("p99", 13)
    more = ("p99 of the draws", 24), ("tokens/s", 10), ("preempted", 10)
    lines = [" " * 26 + "".join(f"{name:>{width}}" for name, width in (*columns, *more))]
    for kind in ("classes", "tenants"):
        for name in dict.fromkeys(name for _, run in runs for name in run[kind]):
            lines.append(name)
            lines += [f"  {label:<24}{_cells(run[kind][name])}" for label, run in runs if name in run[kind]]
    for label, run in runs:
        spreads = run.get("fairness_gap_spread_ms", {})
        gaps = [f"{name} {_ms(gap)}{_between(spreads.get(name))}" for name, gap in run["fairness_gap_ms"].items()]
        lines.append(f"fairness gap, {label}: {', '.join(gaps) or '-'}")
    for name, errors in result["error_percent"].items():
        told = ", ".join(f"{what} {'-' if percent is None else f'{percent:+} %'}" for what, percent in errors.items())
        lines.append(f"error of the model, {name}: {told}")
    draws = result["draws"]
    if draws > 1:
        lines.append(
            f"model and what if: medians of {draws} draws of the noise of the steps (least … most); by chance alone, "
            f"{200 / (draws + 1):.0f} in 100 days lie outside of such a range"
        )
    if result["unserved"]:
        lines.append(
            f"{result['unserved']} requests still waited for a first token when the log ended: what happened has no "
            "time of theirs; model and what if are run on until everybody is served"
        )
    if result["starts_unix_us"]:
        lines.append(
            f"the worker was started anew in it ({', '.join(map(_moment, result['starts_unix_us']))}): each start is "
            "told from its own beginning, and who came again after one counts there"
        )
    lines += [
        f"left out: {each['requests']} requests of an earlier start, recorded from "
        f"{_moment(each['began_unix_us'])} on: {each['why']}"
        for each in result["left_out"]
    ]
    if result["assumed_lengths"]:
        lines.append(f"{result['assumed_lengths']} requests never came to their own end: their length is assumed")
    return "\n".join(lines)


def _moment(unix_us: int) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_us // 1_000_000, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _cells(row: dict[str, Any]) -> str:
    ttft, preempted = row["ttft_ms"], sum(row["preemptions"].values())
    tail = "too few" if ttft["p99"] is None and ttft["p50"] is not None else _ms(ttft["p99"])
    return (
        f"{row['requests']:>9}{row['completed']:>7}{sum(row['refused'].values()):>8}{row['open']:>6}"
        f"{_ms(ttft['p50']):>13}{tail:>13}{_between(row.get('spread', {}).get('ttft_p99')):>24}"
        f"{row['tokens_per_s']:>10}{preempted:>10}"
    )


def _between(spread: list[float] | None) -> str:
    return "" if spread is None else f" ({spread[0]:,.0f} … {spread[1]:,.0f})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
