"""From scheduled rows to logits: flattens rows into one batch, runs the model, says which rows came out finite.

Knows block tables and positions; refuses to know sampling, failures' fate and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from gpu_worker.kernels.layout import Layout
from gpu_worker.kv_cache import KvCache
from gpu_worker.models.batch import Batch
from gpu_worker.models.llama import Llama
from scheduler_engine.plan import ScheduledRow


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

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> Computed:
        """One forward over at least one row. Raises what torch raises."""
        order = arranged(rows)
        layout = layout_of([rows[index] for index in order], self._cache.block_size)
        token_ids = numpy.concatenate([numpy.asarray(rows[index].token_ids, dtype=numpy.int64) for index in order])
        if not 0 <= token_ids.min() <= token_ids.max() < self.model.config.vocab_size:
            raise IndexError("a token id outside the vocabulary")  # on a GPU a wrong index ends the process
        batch = Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(layout.positions()),
            place=self.model.kernels.place(layout),
        )
        normed = self.model.forward(batch, self._cache.device_pool)
        firsts = layout.firsts
        finite_tokens = normed.sum(dim=1).isfinite().numpy()  # one NaN or Inf makes the sum one
        finite_rows = numpy.logical_and.reduceat(finite_tokens, firsts[:-1]).tolist()
        finite, last_token = [True] * len(rows), [0] * len(rows)
        for place, index in enumerate(order):
            finite[index] = finite_rows[place]
            last_token[index] = int(firsts[place + 1]) - 1
        sampling = [last_token[index] for index, row in enumerate(rows) if row.samples]
        if not sampling:
            return Computed(torch.empty(0, self.model.config.vocab_size), finite)
        return Computed(self.model.logits(normed[sampling]), finite)


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
