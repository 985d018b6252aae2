"""From scheduled rows to logits: flattens rows into one batch, runs the model, says which rows came out finite.

Knows block tables and positions; refuses to know sampling, failures' fate and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.kernels.layout import Layout
from gpu_worker.models.batch import Batch
from gpu_worker.models.llama import Llama
from scheduler_engine.plan import ScheduledRow

if TYPE_CHECKING:
    from gpu_worker.device.decode_graphs import Capture, DecodeGraphs

# Batches that decode steps are captured for: steps of a quarter to a half, so that little of a replay is padding.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Computed:
    """``logits`` [R, vocabulary] of the rows that sample, in plan order; ``finite`` has one entry per row."""

    logits: Tensor
    finite: Sequence[bool]


class ModelRunner:
    """Always: a row reads and writes only blocks of its own table."""

    def __init__(self, model: Llama, cache: KvCache) -> None:
        self.model = model
        self._cache = cache
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_decodes(self, capture: Capture, sizes: Sequence[int] = SIZES) -> None:
        """From now on decode steps of up to the largest of ``sizes`` are replayed. Kernels must have run before."""
        from gpu_worker.device.decode_graphs import DecodeGraphs  # triton: only where kernels are compiled

        blocks = min(-(-self.model.config.context_length // self._cache.block_size), len(self._cache.device_pool))
        self._graphs = DecodeGraphs(
            self.model, self._cache.device_pool, capture, num_table_blocks=blocks, sizes=tuple(sizes)
        )

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> Computed:
        """One forward over at least one row. Raises what torch raises."""
        order = arranged(rows)
        layout = layout_of([rows[index] for index in order], self._cache.block_size)
        token_ids = numpy.concatenate([numpy.asarray(rows[index].token_ids, dtype=numpy.int64) for index in order])
        if not 0 <= token_ids.min() <= token_ids.max() < self.model.config.vocab_size:
            raise IndexError("a token id outside the vocabulary")  # on a GPU a wrong index ends the process
        normed = self._forward(layout, token_ids)
        firsts = layout.firsts
        finite_tokens = normed.sum(dim=1, dtype=torch.float32).isfinite().cpu().numpy()  # one NaN or Inf makes it one
        finite_rows = numpy.logical_and.reduceat(finite_tokens, firsts[:-1]).tolist()
        finite, last_token = [True] * len(rows), [0] * len(rows)
        for place, index in enumerate(order):
            finite[index] = finite_rows[place]
            last_token[index] = int(firsts[place + 1]) - 1
        sampling = [last_token[index] for index, row in enumerate(rows) if row.samples]
        if not sampling:
            return Computed(torch.empty(0, self.model.config.vocab_size), finite)
        return Computed(self.model.logits(normed[sampling]).float(), finite)

    def _forward(self, layout: Layout, token_ids: NDArray[numpy.int64]) -> Tensor:
        target = self.model.target
        if self._graphs is not None and self._graphs.fits(layout):
            return self._graphs.run(layout, token_ids)
        batch = Batch(
            token_ids=torch.from_numpy(token_ids).to(target.device),
            positions=torch.from_numpy(layout.positions()).to(target.device),
            place=target.kernels.place(layout),
        )
        return self.model.forward(batch, self._cache.device_pool)


def arranged(rows: Sequence[ScheduledRow]) -> list[int]:
    """Indexes of rows as a Layout wants them: single tokens first, the longest contexts before shorter ones."""
    return sorted(range(len(rows)), key=lambda index: (len(rows[index].token_ids) > 1, -rows[index].start))


def layout_of(rows: Sequence[ScheduledRow], block_size: int) -> Layout:
    """Of rows in their order."""
    used = [blocks_of(row, block_size) for row in rows]
    tables = numpy.empty((len(rows), max(used)), numpy.int32)
    for table, row, num_blocks in zip(tables, rows, used, strict=True):
        table[:num_blocks] = row.block_table[:num_blocks]
        table[num_blocks:] = row.block_table[0]  # padding is masked, and the row's own numbers are finite
    lengths = numpy.array([len(row.token_ids) for row in rows], numpy.int32)
    contexts = numpy.array([row.start for row in rows], numpy.int32) + lengths
    return Layout(tables, contexts, lengths, block_size)


def blocks_of(row: ScheduledRow, block_size: int) -> int:
    """Blocks that hold something once the row is computed."""
    return -(-(row.start + len(row.token_ids)) // block_size)
