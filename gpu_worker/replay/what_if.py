"""What the same traffic would have met under another policy: a recorded log, told to an engine with step times of a
fitted model.

Imports neither torch nor Django, so that a gateway may run it as a process. Its own error is part of the answer: the
recorded policy, run with the model, against what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_worker.replay.fitting import Load
from gpu_worker.replay.modelled import ModelledRun
from gpu_worker.replay.reality import Reality
from gpu_worker.replay.record_log import LogFile, log_files
from gpu_worker.replay.rerun import engine_of, replay
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, snapshot_to_dict

Progress = Callable[[str, float], None]  # what is being done, and how much of all is done, from 0 to 1


class Stopped(Exception):
    """The caller asked to stop."""


def what_if(
    log: Path | Sequence[LogFile],
    policy: PolicySnapshot,
    *,
    progress: Progress = lambda doing, done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Three runs of one log as plain data: ``happened``, ``model`` (the recorded policy, with the model's step times)
    and ``what_if``; ``error_percent`` is the model against what happened when the log ends. The two that might have
    been then run on without new traffic, so that whoever waits long is seen to; rates count up to the log's end.

    Raises LogError for a log that cannot be used, Diverged where this engine does not decide as the log's did, Stopped
    once ``should_stop`` says so (asked with every report of progress).
    """

    def show(doing: str, begin: float, part: float, done: float) -> None:
        if should_stop():
            raise Stopped
        progress(doing, begin + part * min(1.0, done))

    files = log_files(log) if isinstance(log, Path) else log
    boot = files[0].boot()
    cost = CostConstants(**boot.cost)
    reality = Reality(cost, int(boot.config["bytes_per_block"]))
    replay(files, reality, lambda done, total: show("replaying what happened", 0.0, 0.3, done / max(1, total)))
    reality.model.fit()
    unchanged = ModelledRun(boot, engine_of(boot, files[0]), reality, None)
    unchanged.run(lambda done: show("the same policy with modelled step times", 0.3, 0.35, done))
    happened = reality.tally.report()
    errors = _errors(happened, unchanged.tally.report())
    changed = ModelledRun(boot, engine_of(boot, files[0]), reality, policy)
    changed.run(lambda done: show("the other policy", 0.65, 0.35, done))
    progress("done", 1.0)
    return {
        "log": [str(file.path) for file in files],
        "policy": snapshot_to_dict(policy),
        "happened": happened,
        "model": unchanged.run_on().report(),
        "what_if": changed.run_on().report(),
        "error_percent": errors,
        "assumed_lengths": changed.num_assumed,
        "step_model_us": dict(zip(Load._fields, (round(us, 6) for us in reality.model.microseconds), strict=True)),
    }


def _errors(happened: dict[str, Any], model: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Of the model, class by class, in percent of what happened."""
    errors: dict[str, dict[str, float | None]] = {}
    for label, real in happened["classes"].items():
        made = model["classes"].get(label)
        if made is not None:
            errors[label] = {
                "ttft_p50": _percent(real["ttft_ms"]["p50"], made["ttft_ms"]["p50"]),
                "ttft_p99": _percent(real["ttft_ms"]["p99"], made["ttft_ms"]["p99"]),
                "tokens_per_s": _percent(real["tokens_per_s"], made["tokens_per_s"]),
            }
    return errors


def _percent(real: float | None, made: float | None) -> float | None:
    return None if not real or made is None else round(100 * (made - real) / real, 1)


def comparison(result: dict[str, Any]) -> str:
    """The three runs side by side, for a person: classes, then tenants."""
    runs = [("happened", result["happened"]), ("model", result["model"]), ("what if", result["what_if"])]
    columns = ("requests", 9), ("done", 7), ("refused", 8), ("open", 6), ("TTFT p50", 13), ("p99", 13)
    lines = [" " * 26 + "".join(f"{name:>{width}}" for name, width in (*columns, ("tokens/s", 10), ("preempted", 10)))]
    for kind in ("classes", "tenants"):
        for name in dict.fromkeys(name for _, run in runs for name in run[kind]):
            lines.append(name)
            lines += [f"  {label:<24}{_cells(run[kind][name])}" for label, run in runs if name in run[kind]]
    for label, run in runs:
        gaps = ", ".join(f"{name} {_ms(gap)}" for name, gap in run["fairness_gap_ms"].items())
        lines.append(f"fairness gap, {label}: {gaps or '-'}")
    for name, errors in result["error_percent"].items():
        told = ", ".join(f"{what} {'-' if percent is None else f'{percent:+} %'}" for what, percent in errors.items())
        lines.append(f"error of the model, {name}: {told}")
    if result["assumed_lengths"]:
        lines.append(f"{result['assumed_lengths']} requests never came to their own end: their length is assumed")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    ttft, preempted = row["ttft_ms"], sum(row["preemptions"].values())
    return (
        f"{row['requests']:>9}{row['completed']:>7}{sum(row['refused'].values()):>8}{row['open']:>6}"
        f"{_ms(ttft['p50']):>13}{_ms(ttft['p99']):>13}{row['tokens_per_s']:>10}{preempted:>10}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
