"""Which kernels run where: one table, and what a model may ask of them. Knows devices; refuses to know requests."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_worker.kernels.layout import Layout, PoolShape

Norms = tuple[Tensor, Tensor, float]


class Kernels(Protocol):
    """``reference`` says what each computes. Always: a row's result depends on its own tokens and context alone."""

    @property
    def described(self) -> str:
        """How attention is computed, for the log."""
        ...

    def place(self, layout: Layout) -> Any:
        """What ``rotate_and_write`` and ``attend`` of the same kernels need of a step, made once for all layers."""
        ...

    def norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def add_and_norm(self, residual: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Adds ``rows`` to ``residual`` in place and norms the sum."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rotate_and_write(
        self, fused: Tensor, turns: Tensor, pool: Tensor, layer: int, place: Any, norms: Norms | None
    ) -> Tensor:
        """``fused`` [T, H + 2 * K, D] may be overwritten. Returns queries [T, H, D]."""
        ...

    def attend(self, queries: Tensor, pool: Tensor, layer: int, place: Any) -> Tensor:
        """[T, H, D] → [T, H * D]."""
        ...

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None: ...

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, rows: Tensor) -> None: ...


def kernels_for(device: torch.device, shape: PoolShape) -> Kernels:
    """The table: torch's own operators on a CPU, decode attention by numba where it is; Triton on a CUDA device."""
    match device.type:
        case "cpu":
            from gpu_worker.kernels.cpu import CpuKernels
            from gpu_worker.kernels.in_place import decode_attention

            return CpuKernels(shape, decode_attention())
        case "cuda":
            from gpu_worker.kernels.compiled import TritonKernels  # needs triton; a CPU worker does not

            return TritonKernels(shape, device)
    raise ValueError(f"there are no kernels for {device.type}; devices are cpu and cuda")
