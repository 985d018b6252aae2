"""Decode steps replayed from captures, one for each size of batch: a forward's hundreds of launches become one.

Knows rows with one new token. A batch is padded to the next size by rows that look at nothing and write nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.kernels.compiled import Place
from gpu_worker.kernels.layout import Layout
from gpu_worker.models.batch import Batch
from gpu_worker.models.llama import Llama


class Capture(Protocol):
    """Records what ``forward`` does and gives back how to do it again; both return the same output tensor."""

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The tensors that a capture reads, one row of each per row of the batch."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    contexts: Tensor


class DecodeGraphs:
    """Always: a replay gives each row what the model's forward gives it, and leaves every other block as it is."""

    def __init__(
        self, model: Llama, pool: Tensor, capture: Capture, *, num_table_blocks: int, sizes: tuple[int, ...]
    ) -> None:
        """``num_table_blocks``: of the longest context. Runs the model, so the pool's kernels must be tuned before."""
        self._num_table_blocks = num_table_blocks
        device, most = model.target.device, max(sizes)
        self._inputs = _Inputs(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            slots=torch.full((most,), -1, dtype=torch.int64, device=device),
            tables=torch.zeros(most, num_table_blocks, dtype=torch.int32, device=device),
            contexts=torch.zeros(most, dtype=torch.int32, device=device),
        )
        self._replays: dict[int, Callable[[], Tensor]] = {}
        for size in sorted(sizes, reverse=True):  # the largest first: smaller ones fit into its memory
            self._replays[size] = capture(self._forward(model, pool, size))

    def fits(self, layout: Layout) -> bool:
        """Whether every row has one new token and the batch and its contexts are no larger than what was captured."""
        num_rows = len(layout.lengths)
        is_single = layout.num_single == num_rows
        return is_single and num_rows <= max(self._replays) and layout.tables.shape[1] <= self._num_table_blocks

    def run(self, layout: Layout, token_ids: NDArray[numpy.int64]) -> Tensor:
        """Normed hidden states [R, hidden]; overwritten by the next run. ``layout`` must fit."""
        num_rows = len(layout.lengths)
        size = min(size for size in self._replays if size >= num_rows)
        blocks, slots = layout.places()
        inputs = self._inputs
        inputs.token_ids[:num_rows].copy_(torch.from_numpy(token_ids))
        inputs.positions[:num_rows].copy_(torch.from_numpy(layout.positions()))
        inputs.slots[:num_rows].copy_(torch.from_numpy(blocks * layout.block_size + slots))
        inputs.tables[:num_rows, : layout.tables.shape[1]].copy_(torch.from_numpy(layout.tables))
        inputs.contexts[:num_rows].copy_(torch.from_numpy(layout.contexts))
        for name, nothing in (("token_ids", 0), ("positions", 0), ("slots", -1), ("contexts", 0)):
            getattr(inputs, name)[num_rows:size].fill_(nothing)
        return self._replays[size]()[:num_rows]

    def _forward(self, model: Llama, pool: Tensor, size: int) -> Callable[[], Tensor]:
        mine = _Inputs(*(getattr(self._inputs, field.name)[:size] for field in fields(_Inputs)))
        place = Place(mine.slots, mine.tables, mine.contexts, num_single=size)
        batch = Batch(mine.token_ids, mine.positions, place)
        return lambda: model.forward(batch, pool)
