"""Time on a device, and the two ceilings everything is held against: copying and multiplying. Knows tensors only."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.weights import EMBEDDING, Embedding

REPETITIONS = 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Always: ``dtype`` is what the device computes in; a CPU stands in for a GPU through Triton's interpreter."""

    device: torch.device
    dtype: torch.dtype

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def settle(self) -> None:
        """Block until the device is idle."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
        """Median of several runs after one that is not counted, by the device's clock where it has one."""
        work()
        self.settle()
        return statistics.median(self._once(work) for _ in range(repetitions if self.is_gpu else 1))

    def _once(self, work: Callable[[], object]) -> float:
        if not self.is_gpu:
            started_ns = time.perf_counter_ns()
            work()
            return (time.perf_counter_ns() - started_ns) / 1e9
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``bytes_per_s``: read plus written by a large copy. ``operations_per_s``: of a large matrix product."""

    bytes_per_s: float
    operations_per_s: float

    def floor_s(self, num_bytes: float, operations: float = 0.0) -> float:
        """No kernel that moves and computes so much can be quicker."""
        return max(num_bytes / self.bytes_per_s, operations / self.operations_per_s)


def ceilings(machine: Machine) -> Ceilings:
    size, side = (1 << 30, 8_192) if machine.is_gpu else (1 << 24, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    target, matrix = torch.empty_like(source), machine.random(side, side)
    copied = machine.seconds(lambda: target.copy_(source))
    multiplied = machine.seconds(lambda: matrix @ matrix)
    return Ceilings(2 * size / copied, 2 * side**3 / multiplied)


class DeviceWeights:
    """See ``weights.Weights``. Random numbers made where they are used: 16 GB of them would take a CPU minutes."""

    def __init__(self, config: ModelConfig, machine: Machine) -> None:
        self.config = config
        self._machine = machine

    def tensor(self, name: str, *shape: int) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=self._machine.dtype, device=self._machine.device)
        return self._machine.random(*shape).mul_(0.02)

    def embedding(self, *shape: int) -> Embedding:
        table = self.tensor(EMBEDDING, *shape)
        return lambda token_ids: torch.nn.functional.embedding(token_ids, table)
