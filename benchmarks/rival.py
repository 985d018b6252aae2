"""A rival's scheduler beside ours in one run: the same cost model, the same arrivals, the same figures.

The rival lives in a virtual environment of its own; this module speaks with it in lines of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import quantile, say
from gpu_worker.simulated import DEVICES, DeviceProfile
from gpu_worker.simulation.clients import quantiles_ms
from gpu_worker.simulation.run import Simulation
from gpu_worker.simulation.stories import STORIES
from gpu_worker.simulation.traffic import SECOND_US, Arrival, Pace
from scheduler_engine.events import Lever
from scheduler_engine.policy import PriorityClass

SCRIPTS = {"vllm": Path(__file__).with_name("vllm_rival.py")}
DEVICE = "h200-8b"
_PRIORITIES = {"interactive": 0, "default": 5, "batch": 10}  # vLLM's: less is more urgent

# What its server takes by itself on an H200, and what a patient operator would try: a smaller token budget, a watermark
# of free blocks, and clients that keep no more than so many batch requests in flight (which leaves slots for chats, as
# a smaller max_num_seqs does not).
DEFAULT_NAME = "vllm, default flags"
_DEFAULT_TOKENS, _DEFAULT_SEQS = 8_192, 1_024


class Setting(NamedTuple):
    """How the rival is run. ``batch_in_flight`` None: all batch requests are sent at once."""

    tokens: int = _DEFAULT_TOKENS
    watermark: float = 0.0
    batch_in_flight: int | None = None

    @property
    def name(self) -> str:
        if self == Setting():
            return DEFAULT_NAME
        watermark = f", watermark {self.watermark:.0%}" if self.watermark else ""
        cap = "" if self.batch_in_flight is None else f", {self.batch_in_flight} batch in flight"
        return f"vllm, {self.tokens} tokens{watermark}{cap}"

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "policy": "priority",
            "max_num_seqs": min(_DEFAULT_SEQS, self.tokens),  # vLLM wants a token for each
            "max_num_batched_tokens": self.tokens,
            "watermark": self.watermark,
        }


SWEPT = (
    Setting(2_048),
    Setting(1_024),
    Setting(512),
    Setting(768, watermark=0.05),
    Setting(768, batch_in_flight=240),
    Setting(768, batch_in_flight=160),
    Setting(768, batch_in_flight=64),
    Setting(1_024, batch_in_flight=16),
)


class RivalAbsent(Exception):
    """It cannot be run here; the sentence says why."""


class Rival:
    """A rival's process. Always: one answer for one question."""

    def __init__(self, process: subprocess.Popen[str], version: str, errors: Path) -> None:
        self.version = version
        self._process = process
        self._errors = errors

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RivalAbsent when it has died."""
        return _ask(self._process, json.dumps(question), self._errors)


def _ask(process: subprocess.Popen[str], line: str, errors: Path) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        while (answer := process.stdout.readline()) and not answer.startswith("{"):
            pass  # what its libraries print
    except BrokenPipeError:
        answer = ""
    if not answer:
        last = [line.strip() for line in errors.read_text().splitlines() if line.strip()][-3:]
        raise RivalAbsent(f"the rival ended: {'; '.join(last) or 'it said nothing'}")
    found: dict[str, Any] = json.loads(answer)
    return found


@contextmanager
def running(name: str, python: Path) -> Iterator[Rival]:
    """Raises RivalAbsent when ``python`` is none or lacks the rival."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="rival-") as folder, Path(folder, "stderr").open("w+") as errors:
        try:
            process = subprocess.Popen(
                [
                    str(python),
                    "-P",
                    str(SCRIPTS[name]),
                ],  # -P: no module of this folder stands in for one of the rival's
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise RivalAbsent(f"{python}: {error.strerror}") from None
        with process:
            try:
                path = Path(errors.name)
                yield Rival(process, _ask(process, "", path)["version"], path)
            finally:
                process.kill()


def quiet_steps(rival: Rival, *, running: int, waiting: int, steps: int, prompt: int) -> dict[str, float | None]:
    """The keys of ``benchmarks.scheduler``, of the rival."""
    question = {"do": "steady", "running": running, "waiting": waiting, "steps": steps, "prompt": prompt}
    found = rival.ask(question)
    plan_ns, apply_ns = found["plan_ns"], found["apply_ns"]
    step_ns = [plan + apply for plan, apply in zip(plan_ns, apply_ns, strict=True)]
    return {
        "step_ms_p50": _ms(quantile(step_ns, 0.5)),
        "step_ms_p99": _ms(quantile(step_ns, 0.99)),
        "plan_ms_p50": _ms(quantile(plan_ns, 0.5)),
        "apply_ms_p50": _ms(quantile(apply_ns, 0.5)),
    }


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1_000_000, 4)


Rows = dict[str, dict[str, Any]]


def told_to_both(rival: Rival, story: str, *, seed: int, window_s: int) -> Rows:
    """A story's first ``window_s`` seconds, told to us and to the rival with each setting; rows by name."""
    device = DEVICES[DEVICE]
    until_us = window_s * SECOND_US
    arrivals = [each for each in STORIES[story].tell(seed, Pace(device)) if each.at_us < until_us]
    rows = {"rubato": _ours(device, arrivals, until_us)}
    for setting in (Setting(), *SWEPT):
        say(f"{story}, seed {seed}: {setting.name}")
        rows[setting.name] = _theirs(rival, device, arrivals, until_us, setting)
    return rows


def _ours(device: DeviceProfile, arrivals: Sequence[Arrival], until_us: int) -> dict[str, Any]:
    outcome = Simulation(device, arrivals).run(until_us=until_us)
    chats = outcome.clients.of_class(PriorityClass.INTERACTIVE)
    lost_memory = [
        count
        for counters in outcome.telemetry.classes.values()
        for (lever, _), count in counters.preemptions.items()
        if lever != Lever.HOLD
    ]
    return {
        "chats": chats.ttft.total(),
        "ttft_ms": quantiles_ms(chats.ttft),
        "itl_ms": quantiles_ms(chats.gaps),
        "batch_work_s": round(outcome.timeline.work_us(PriorityClass.BATCH, 0, until_us) / 1_000_000, 2),
        "preemptions": sum(lost_memory),
        "recomputed_tokens": sum(usage.counters.recomputed_tokens for usage in outcome.usages),
    }


def _theirs(
    rival: Rival, device: DeviceProfile, arrivals: Sequence[Arrival], until_us: int, setting: Setting
) -> dict[str, Any]:
    found = rival.ask(
        {
            "do": "story",
            "cost": asdict(device.cost),
            "flags": setting.flags,
            "batch_in_flight": setting.batch_in_flight,
            "num_blocks": device.shape.num_blocks,
            "max_model_len": device.shape.max_model_len,
            "until_us": until_us,
            "arrivals": [_row(each) for each in arrivals],
        }
    )
    chats = found["classes"].get("interactive", {"ttft_us": [], "gaps_us": []})
    return {
        "chats": sum(count for _, count in chats["ttft_us"]),
        "ttft_ms": quantiles_ms(dict(chats["ttft_us"])),
        "itl_ms": quantiles_ms(dict(chats["gaps_us"])),
        "batch_work_s": round(found["work_us"].get("batch", 0) / 1_000_000, 2),
        "preemptions": found["preemptions"],
        "recomputed_tokens": found["recomputed_tokens"],
    }


def _row(arrival: Arrival) -> tuple[int, str, str, int, int, int]:
    submit = arrival.submit
    label = submit.priority_class.label
    prompt, output = len(submit.prompt_token_ids), submit.max_tokens
    return arrival.at_us, submit.response_id, label, prompt, output, _PRIORITIES[label]


def medians(seeds: Sequence[Rows]) -> Rows:
    """Row by row the median over the seeds, where there are several."""
    return {name: _median([rows[name] for rows in seeds]) for name in seeds[0]}


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def rows_table(story: str, rows: Rows) -> str:
    """Side by side, with ratios to ours: above 1.00 theirs is more. Of the settings that do at least our batch work
    (within 2 %), the one with the best tail is the rival as tuned by hand.
    """
    ours = rows["rubato"]
    lines = [
        f"{story:<46}{'chats':>7}{'TTFT p50':>11}{'TTFT p99':>11}{'ITL p99':>10}{'batch work':>12}{'preempted':>11}"
        f"{'p99 / ours':>12}{'batch / ours':>14}"
    ]
    for name, row in rows.items():
        ttft, itl, batch_s = row["ttft_ms"], row["itl_ms"], row["batch_work_s"]
        lines.append(
            f"{name:<46}{row['chats']:>7.0f}{ttft['p50'] or 0:>8,.0f} ms{ttft['p99'] or 0:>8,.0f} ms"
            f"{itl['p99'] or 0:>7,.0f} ms{batch_s:>10.1f} s{row['preemptions']:>11.0f}"
            f"{(ttft['p99'] or 0) / ours['ttft_ms']['p99']:>12.2f}{batch_s / ours['batch_work_s']:>14.2f}"
        )
    tuned = best_tuned(rows)
    if tuned is None:
        lines.append("No setting tried by hand does our batch work.")
    else:
        lines.append(
            f"At no less batch than ours the best tail tried by hand is {tuned[1]:.2f} times ours ({tuned[0]})."
        )
    return "\n".join(lines)


def best_tuned(rows: Rows) -> tuple[str, float] | None:
    """(its name, its TTFT p99 over ours); None where no setting does our batch work."""
    ours = rows["rubato"]
    able = [
        (row["ttft_ms"]["p99"] / ours["ttft_ms"]["p99"], name)
        for name, row in rows.items()
        if name not in ("rubato", DEFAULT_NAME)
        and row["ttft_ms"]["p99"] is not None
        and row["batch_work_s"] >= 0.98 * ours["batch_work_s"]
    ]
    if not able:
        return None
    ratio, name = min(able)
    return name, ratio
