"""The Triton kernels as a model asks for them. Knows tensors and one device; outputs are allocated here.

Through Triton's interpreter the same class runs on a CPU, which is how it is tested where there is no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.kernels import block_copy, paged_decode, paged_prefill
from gpu_worker.kernels.choice import Norms
from gpu_worker.kernels.layout import Layout, PoolShape
from gpu_worker.kernels.paged_decode import attend_decode
from gpu_worker.kernels.paged_prefill import Tiles, attend_prefill, tiles_of
from gpu_worker.kernels.rms_norm import rms_norm
from gpu_worker.kernels.rotary_write import rotate_and_write
from gpu_worker.kernels.swiglu import swiglu


def forget_tuning() -> None:
    """Let the attention kernels choose their tiles anew at their next call: a check's small sizes choose badly."""
    for kernel in (paged_decode._attend_part, paged_prefill._attend_tile):
        kernel.cache.clear()


@dataclass(frozen=True, slots=True)
class Place:
    """``slots`` [T] int64, -1 = nowhere. Rows up to ``num_single`` have one new token, those behind are in tiles."""

    slots: Tensor
    tables: Tensor  # [R, blocks] int32
    contexts: Tensor  # [R] int32
    num_single: int
    firsts: Tensor | None = None  # [chunks + 1] int32, of the rows behind, counted from the first of their tokens
    tiles: Tiles | None = None


class TritonKernels:
    """See ``Kernels``. Always: computes in float32 and rounds to the tensors' precision at the end."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    @property
    def described(self) -> str:
        return "kernels by Triton"

    def place(self, layout: Layout) -> Place:
        blocks, slots = layout.places()
        single, chunks = layout.num_single, layout.lengths[layout.num_single :].tolist()
        return Place(
            slots=self._tensor(blocks * layout.block_size + slots),
            tables=self._tensor(layout.tables),
            contexts=self._tensor(layout.contexts),
            num_single=single,
            firsts=self._tensor(layout.firsts[single:] - single) if chunks else None,
            tiles=tiles_of(chunks, self._shape.group, self._device) if chunks else None,
        )

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(self._device, non_blocking=True)

    def norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(rows)
        rms_norm(rows, weight, epsilon, out)
        return out

    def add_and_norm(self, residual: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(rows)
        rms_norm(rows, weight, epsilon, out, residual)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        swiglu(gate_up, out)
        return out

    def rotate_and_write(
        self, fused: Tensor, turns: Tensor, pool: Tensor, layer: int, place: Place, norms: Norms | None
    ) -> Tensor:
        queries = fused.new_empty(fused.shape[0], self._shape.num_heads, self._shape.head_dim)
        rotate_and_write(fused, place.slots, turns, pool[:, layer], queries, norms)
        return queries

    def attend(self, queries: Tensor, pool: Tensor, layer: int, place: Place) -> Tensor:
        out, single, layer_pool = torch.empty_like(queries), place.num_single, pool[:, layer]
        if single:
            tables, contexts = place.tables[:single], place.contexts[:single]
            attend_decode(queries[:single], layer_pool, tables, contexts, out[:single])
        if place.firsts is not None and place.tiles is not None:
            tables, contexts = place.tables[single:], place.contexts[single:]
            where = (layer_pool, tables, contexts, place.firsts)
            attend_prefill(queries[single:], *where, out[single:], tiles=place.tiles)
        return out.flatten(1)

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None:
        block_copy.gather_blocks(pool.flatten(1), blocks, out.flatten(1))

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
        block_copy.scatter_blocks(pool.flatten(1), blocks, rows.flatten(1))
