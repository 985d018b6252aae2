"""All of a GPU in one command, in less than eight minutes: kernels right, then against their floors; the model, swaps,
a flood, and transformers' continuous batching beside it.

    PYTHONPATH=.:platform python -m benchmarks.gpu --json

Needs torch, triton, numpy, safetensors and, for the rival, transformers; no model file, no network, no Django, Redis or
msgspec. ``--rehearse`` goes through all of it on a CPU, with a tiny model and Triton's interpreter: its times mean
nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import gpu_flood, gpu_model, gpu_rival, kernels
from benchmarks.device import Ceilings, Machine, ceilings
from benchmarks.figures import machine as this_python
from benchmarks.figures import report, say

BUDGET_S = 420


class Parts:
    """What was measured, part by part. Always: a part that finds the time used up is named as left out."""

    def __init__(self, budget_s: float) -> None:
        self.found: dict[str, Any] = {}
        self._ends_s = time.monotonic() + budget_s

    def add(self, name: str, measure: Callable[[], Any]) -> None:
        started_s = time.monotonic()
        if started_s >= self._ends_s:
            self.found[name] = "left out: the time was used up"
            return
        try:
            self.found[name] = measure()
        except torch.OutOfMemoryError as error:
            self.found[name] = f"out of memory: {str(error).partition('.')[0]}"
        say(f"{name}: {time.monotonic() - started_s:.0f} s")


def measure(machine: Machine, *, rehearse: bool, budget_s: float) -> dict[str, Any]:
    parts = Parts(budget_s)
    limits = ceilings(machine)
    parts.found["copy_gb_per_s"] = round(limits.bytes_per_s / 1e9, 1)
    parts.found["matmul_tflops"] = round(limits.operations_per_s / 1e12, 2)
    parts.add("kernels", lambda: _kernels(machine, limits, rehearse))
    plan = gpu_model.REHEARSAL if rehearse else gpu_model.FULL
    _on_model(parts, machine, limits, plan, gpu_flood.REHEARSAL if rehearse else gpu_flood.Story())
    if machine.is_gpu:
        torch.cuda.empty_cache()  # our model has gone: room for the rival's
    load = gpu_rival.REHEARSAL if rehearse else gpu_rival.Load()
    parts.add("transformers", lambda: gpu_rival.measure(plan.config, machine, load))
    return parts.found


def _on_model(parts: Parts, machine: Machine, limits: Ceilings, plan: gpu_model.Plan, story: gpu_flood.Story) -> None:
    executor = gpu_model.build(machine, plan)
    parts.add("model", lambda: gpu_model.OnModel(executor, machine, limits, plan).all())
    cost = executor.calibrate_costs() if machine.is_gpu else gpu_flood.REHEARSED_COST
    parts.add("flood", lambda: gpu_flood.Flood(executor, cost, story).run())
    executor.close()


def _kernels(machine: Machine, limits: Ceilings, rehearse: bool) -> dict[str, Any]:
    sizes = kernels.REHEARSAL if rehearse else kernels.Sizes()
    shape = kernels.TINY if rehearse else kernels.LLAMA_8B
    return {one.name: one.figures() for one in kernels.Cases(machine, limits, sizes, shape).all()}


def versions() -> dict[str, Any]:
    names = ("torch", "triton", "transformers")
    found: dict[str, Any] = {name: importlib.metadata.version(name) for name in names if _is_installed(name)}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny: shows that the command works")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"no part starts later ({BUDGET_S})")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    machine = kernels.this_machine()
    if not (machine.is_gpu or found.rehearse):
        say("there is no GPU here; --rehearse shows the way through this command on a CPU")
        return 2
    result: dict[str, Any] = {"bench": "gpu", "rehearsal": not machine.is_gpu, **versions(), **this_python()}
    result["wrong_kernels"] = wrong = kernels.wrong_kernels(machine)
    if wrong:
        say("kernels are wrong; nothing was timed")
    else:
        result |= measure(machine, rehearse=not machine.is_gpu or found.rehearse, budget_s=found.budget_s)
    report(result, as_json=found.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
