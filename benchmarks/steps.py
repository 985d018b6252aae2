"""Steps of the demo's model on this CPU: packed, 8-bit and plain torch linears in turn, in one process, by CPU time.

With them ``copied``, packed linears with the attention of a worker without numba, which copies contexts, and ``spare``,
packed ones with a plain copy for single rows (``--spare-weights``). Shows what a step is made of: its share of
attention, and what that share would be if keys and values were only read, at the rate at which this machine reads
memory; what lies outside the forward; how much of the rate of a large matrix product a prefill reaches, with its
attention's products counted and without. Knows the executor and made-up plans; no server and no scheduler is in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import machine, report, say
from gpu_worker.demo_model import DEFAULT_FOLDER, fetch
from gpu_worker.device import large_pages
from gpu_worker.device.building import assemble
from gpu_worker.device.kv_cache import bytes_per_block
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.kernels.cpu import CpuKernels
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.batch import pool_shape
from gpu_worker.models.llama import Llama
from gpu_worker.models.target import Target, plain_linear, target_for
from gpu_worker.models.weights import open_weights
from scheduler_engine.plan import ScheduledRow, StepPlan
from scheduler_engine.request import RequestId

DECODES = ((1, 128), (8, 128), (16, 128), (32, 512))
PREFILL = 512
KV_MIB = 800
SIDE = 1_024


class Clock:
    """CPU time of the process, and how much of it went into what is wrapped."""

    def __init__(self) -> None:
        self.inside_ns = 0

    def wrap(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started_ns = time.process_time_ns()
            try:
                return work(*arguments)
            finally:
                self.inside_ns += time.process_time_ns() - started_ns

        return timed


class Subject:
    """One way to compute the model. Always: the quickest of a step's runs counts, whole and in parts."""

    def __init__(self, path: Path, target: Target) -> None:
        weights = open_weights(path)
        model = Llama(weights, target)
        large_pages.collapse()
        self.executor: ModelExecutor = assemble(model, kv_mib=KV_MIB, host_kv_mib=0)
        self.executor.cache.device_pool.normal_(generator=torch.Generator().manual_seed(0))
        self._forward, self._attention = Clock(), Clock()
        self.best: dict[str, tuple[float, float, float]] = {}  # step: whole, outside the forward, attention, in ms
        model.forward = self._forward.wrap(model.forward)  # type: ignore[method-assign]
        model.logits = self._forward.wrap(model.logits)  # type: ignore[method-assign]
        kernels: Any = target.kernels
        kernels.attend = self._attention.wrap(kernels.attend)

    def run(self, name: str, plan: StepPlan) -> None:
        self._forward.inside_ns = self._attention.inside_ns = 0
        started_ns = time.process_time_ns()
        failed = self.executor.execute(plan).failed
        whole_ns = time.process_time_ns() - started_ns
        if failed:
            raise RuntimeError(f"a made-up row failed: {failed[0].reason}")
        found = (whole_ns, whole_ns - self._forward.inside_ns, self._attention.inside_ns)
        self.best[name] = min(self.best.get(name, (float("inf"),)), tuple(part / 1e6 for part in found))  # type: ignore[type-var, assignment]


def plan_of(rows: Sequence[ScheduledRow]) -> StepPlan:
    return StepPlan(step=0, chunks=tuple(rows), swap_out=(), swap_in=(), token_budget=0, wake_at_us=None)


def decode(num_rows: int, context: int) -> StepPlan:
    """One token each for rows whose blocks lie scattered."""
    used = -(-context // BLOCK_SIZE)
    blocks = list(range(num_rows * used))
    random.Random(0).shuffle(blocks)
    tables = [blocks[row * used : (row + 1) * used] for row in range(num_rows)]
    return plan_of(
        [
            ScheduledRow(RequestId(str(row)), [5 + row], context - 1, tables[row], True, (), None)
            for row in range(num_rows)
        ]
    )


def prefill(num_tokens: int) -> StepPlan:
    table = range(-(-num_tokens // BLOCK_SIZE))
    return plan_of([ScheduledRow(RequestId("chunk"), [5] * num_tokens, 0, table, True, (), None)])


def matmul_rate() -> float:
    """Operations per second of a square product of SIDE in float32; the best of ten."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    quickest = min(_cpu_ns(lambda: left @ right) for _ in range(10))
    return 2 * SIDE**3 / quickest * 1e9


def read_rate(pool: Tensor) -> float:
    """Bytes per second of adding up a whole pool; the best of three."""
    return pool.nbytes / min(_cpu_ns(pool.sum) for _ in range(3)) * 1e9


def _cpu_ns(work: Callable[[], object]) -> int:
    started_ns = time.process_time_ns()
    work()
    return time.process_time_ns() - started_ns


def measure(path: Path, repetitions: int) -> dict[str, Any]:
    config = open_weights(path).config
    full = target_for(config)
    subjects = {
        "packed": Subject(path, full),
        "plain": Subject(path, Target(full.device, full.dtype, target_for(config).kernels, plain_linear)),
        "int8": Subject(path, target_for(config, precision="int8")),
        "copied": Subject(path, replace(full, kernels=CpuKernels(pool_shape(config, BLOCK_SIZE)))),
        "spare": Subject(path, target_for(config, spare_weights=True)),
    }
    plans = {f"decode {rows} x {context}": decode(rows, context) for rows, context in DECODES}
    plans[f"prefill {PREFILL}"] = prefill(PREFILL)
    rate = reading = 0.0
    for _ in range(repetitions):
        rate = max(rate, matmul_rate())
        reading = max(reading, read_rate(subjects["packed"].executor.cache.device_pool))
        for name, plan in plans.items():
            for subject in subjects.values():
                subject.run(name, plan)
        say("a round is done")
    per_token = (
        config.num_layers
        * config.hidden_size
        * ((2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size)
    )
    pairs = PREFILL * (PREFILL + 1) // 2 * config.num_layers  # of tokens that look at one another
    in_linears, in_attention = 2 * per_token * PREFILL, 4 * pairs * config.num_heads * config.head_dim
    token_bytes = bytes_per_block(config, BLOCK_SIZE) // BLOCK_SIZE
    found: dict[str, Any] = {"matmul_gflops": round(rate / 1e9, 1), "read_gb_per_s": round(reading / 1e9, 1)}
    for kind, subject in subjects.items():
        found[kind] = {name: _figures(name, best) for name, best in subject.best.items()}
        for rows, context in DECODES:
            whole, _, attention = subject.best[f"decode {rows} x {context}"]
            floor_ms = rows * context * token_bytes / reading * 1e3
            share = floor_ms / (whole - attention + floor_ms)
            found[kind][f"decode {rows} x {context}"]["attention_share_if_only_read"] = round(share, 3)
        prefill_s = subject.best[f"prefill {PREFILL}"][0] / 1e3
        found[kind][f"prefill {PREFILL}"] |= {
            "of_matmul_rate": round((in_linears + in_attention) / prefill_s / rate, 3),
            "of_matmul_rate_linears_alone": round(in_linears / prefill_s / rate, 3),
        }
    return found


def _figures(name: str, best: tuple[float, float, float]) -> dict[str, Any]:
    whole, outside, attention = best
    tokens = int(name.split()[1])
    return {
        "ms": round(whole, 1),
        "tokens_per_s": round(tokens / whole * 1e3, 1),
        "attention_share": round(attention / whole, 3),
        "outside_share": round(outside / whole, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or folder (the demo's model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = found.model or fetch(DEFAULT_FOLDER)
    report({"bench": "steps", **measure(path, found.rounds), **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
