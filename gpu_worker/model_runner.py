"""From scheduled rows to logits: flattens rows into one batch, runs the model, says which rows came out finite.

Knows block tables and positions; refuses to know sampling, failures' fate and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.kv_cache import KvCache
from gpu_worker.models.batch import AttentionGroup, Batch
from gpu_worker.models.llama import Llama
from scheduler_engine.plan import ScheduledRow

PADDED_BLOCKS_LIMIT = 12  # a further group costs about as much as copying so many blocks in vain
GROUP_BLOCKS_LIMIT = 2_048  # bounds the scratch of a group


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
        self._scratch = torch.empty(0)

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> Computed:
        """One forward over at least one row. Raises what torch raises."""
        groups = group_rows(rows, self._cache.block_size)
        order = [index for group in groups for index in group]
        last = numpy.cumsum([len(rows[index].token_ids) for index in order])
        hidden = self.model.forward(self._batch(rows, groups), self._cache.device_pool)
        token_is_finite = hidden.sum(dim=1).isfinite()  # one NaN or Inf makes the sum one
        finite, last_token = [True] * len(rows), [0] * len(rows)
        for index, end in zip(order, last.tolist(), strict=True):
            finite[index] = bool(token_is_finite[end - len(rows[index].token_ids) : end].all())
            last_token[index] = end - 1
        sampling = [last_token[index] for index, row in enumerate(rows) if row.samples]
        if not sampling:
            return Computed(torch.empty(0, self.model.config.vocab_size), finite)
        return Computed(self.model.logits(hidden[sampling]), finite)

    def _batch(self, rows: Sequence[ScheduledRow], groups: Sequence[Sequence[int]]) -> Batch:
        ordered = [rows[index] for group in groups for index in group]
        token_ids = numpy.concatenate([numpy.asarray(row.token_ids, dtype=numpy.int64) for row in ordered])
        positions = numpy.concatenate([numpy.arange(row.start, row.start + len(row.token_ids)) for row in ordered])
        slots = numpy.concatenate([self._slots(row) for row in ordered])
        attention, first = [], 0
        for group in groups:
            members = [rows[index] for index in group]
            attention.append(self._attention_group(members, first))
            first = attention[-1].last
        self._reserve(max(group.chunks.numel() for group in attention))
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            groups=tuple(attention),
            scratch=self._scratch,
        )

    def _slots(self, row: ScheduledRow) -> NDArray[numpy.int64]:
        """[n * 2 * K]: where in layer 0 each (token, plane, head) goes; see kernels.reference."""
        block_size, heads = self._cache.block_size, self.model.config.num_kv_heads
        positions = numpy.arange(row.start, row.start + len(row.token_ids))
        table = numpy.asarray(row.block_table, dtype=numpy.int64)
        heads_of_block = table[positions // block_size] * self._heads_per_block
        plane_and_head = numpy.arange(2 * heads)
        return ((heads_of_block[:, None] + plane_and_head) * block_size + (positions % block_size)[:, None]).reshape(-1)

    def _attention_group(self, members: Sequence[ScheduledRow], first: int) -> AttentionGroup:
        block_size, heads = self._cache.block_size, self.model.config.num_kv_heads
        num_blocks = max(blocks_of(row, block_size) for row in members)
        tables = numpy.empty((len(members), num_blocks), dtype=numpy.int64)
        for table, row in zip(tables, members, strict=True):
            used = blocks_of(row, block_size)
            table[:used] = row.block_table[:used]
            table[used:] = row.block_table[0]  # padding is masked, and the row's own numbers are finite
        planes, head_index = numpy.arange(2)[:, None, None, None] * heads, numpy.arange(heads)[None, None, :, None]
        chunks = tables[None, :, None, :] * self._heads_per_block + planes + head_index  # [2, g, K, b]
        return AttentionGroup(
            first=first,
            last=first + sum(len(row.token_ids) for row in members),
            chunks=torch.from_numpy(chunks.reshape(-1)),
            mask=self._mask(members, num_blocks * block_size),
        )

    def _mask(self, members: Sequence[ScheduledRow], width: int) -> Tensor:
        num_new = len(members[0].token_ids)
        starts = torch.tensor([row.start for row in members])
        last_seen = starts[:, None] + torch.arange(num_new)  # [g, n]: a query sees itself and all before it
        hidden = torch.arange(width) > last_seen[:, :, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]  # [g, 1, n, width]
        group = self.model.config.num_heads // self.model.config.num_kv_heads
        return mask if num_new == 1 else mask.repeat(1, 1, group, 1)

    @property
    def _heads_per_block(self) -> int:
        return self.model.config.num_layers * 2 * self.model.config.num_kv_heads

    def _reserve(self, num_chunks: int) -> None:
        needed = num_chunks * self._cache.block_size * self.model.config.head_dim
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)


def blocks_of(row: ScheduledRow, block_size: int) -> int:
    """Blocks that hold something once the row is computed."""
    return -(-(row.start + len(row.token_ids)) // block_size)


def group_rows(rows: Sequence[ScheduledRow], block_size: int) -> list[list[int]]:
    """Indexes of rows that attend together: single tokens by context length with little padding, chunks alone."""
    groups: list[list[int]] = [[index] for index, row in enumerate(rows) if len(row.token_ids) > 1]
    singles = [index for index, row in enumerate(rows) if len(row.token_ids) == 1]
    singles.sort(key=lambda index: -blocks_of(rows[index], block_size))
    open_group: list[int] = []
    longest = padded = 0
    for index in singles:
        blocks = blocks_of(rows[index], block_size)
        padded += longest - blocks
        if open_group and (padded > PADDED_BLOCKS_LIMIT or (len(open_group) + 1) * longest > GROUP_BLOCKS_LIMIT):
            groups.append(open_group)
            open_group = []
        if not open_group:
            longest, padded = blocks, 0
        open_group.append(index)
    if open_group:
        groups.append(open_group)
    return groups
