"""What a CPU runs: torch's operators in an order that keeps a row's context in the cache. Knows tensors only.

Attention copies the context of few rows at a time, about CONTEXT_TOKENS of one layer, into a dense piece and attends to
it there: memory is read once, the copy never leaves the cache, and dense operands are what torch attends to fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.kernels.choice import Norms
from gpu_worker.kernels.layout import Layout, PoolShape

CONTEXT_TOKENS = 640  # of a group, so that its copy stays in a second-level cache; a longer row goes alone
PADDED_TOKENS = 192  # a further group costs about as much as attending to so many tokens in vain
QUERY_TILE = 128  # queries of a chunk that attend together; later tokens are not looked at


@dataclass(frozen=True, slots=True)
class Tile:
    """New tokens ``[first, last)`` of a row that is alone in its group. ``mask`` [n, end]: 0 where one may look."""

    first: int
    last: int
    end: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together. Always: either one new token each, or one row alone, in tiles.

    ``[first, last)``: their new tokens. ``blocks`` [g * b] int64: layer 0 of their blocks, row by row. ``mask``
    [g, 1, 1, context]: 0 where a row has a token, -inf elsewhere; None where all have equally many.
    """

    first: int
    last: int
    num_rows: int
    context: int
    blocks: Tensor
    mask: Tensor | None
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """``slots`` [T] int64: each new token's place among the pool's tokens of layer 0."""

    slots: Tensor
    groups: tuple[Group, ...]


class CpuKernels:
    """See ``Kernels``. Float32."""

    def __init__(self, shape: PoolShape) -> None:
        self._shape = shape
        self._scratch = torch.empty(0)

    def place(self, layout: Layout) -> Place:
        blocks, slots = layout.places()
        tokens = blocks * self._shape.num_layers * layout.block_size + slots
        return Place(torch.from_numpy(tokens), tuple(_groups(layout, self._shape.num_layers)))

    def norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return functional.rms_norm(rows, weight.shape, weight, epsilon)

    def add_and_norm(self, residual: Tensor, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.norm(residual.add_(rows), weight, epsilon)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotate_and_write(
        self, fused: Tensor, turns: Tensor, pool: Tensor, layer: int, place: Place, norms: Norms | None
    ) -> Tensor:
        num_heads, num_kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        turned = fused[:, : num_heads + num_kv_heads]
        if norms is not None:
            query_norm, key_norm, epsilon = norms
            turned[:, :num_heads] = self.norm(turned[:, :num_heads], query_norm, epsilon)
            turned[:, num_heads:] = self.norm(turned[:, num_heads:], key_norm, epsilon)
        cos, sin = turns[:, :1], turns[:, 1:]  # [T, 1, D / 2]
        first, second = turned.chunk(2, dim=-1)
        turned_second = torch.addcmul(second * cos, first, sin)
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.copy_(turned_second)
        tokens = pool.view(-1, 2 * num_kv_heads * self._shape.head_dim)[layer * self._shape.block_size :]
        tokens.index_copy_(0, place.slots, fused[:, num_heads:].flatten(1))
        return fused[:, :num_heads]

    def attend(self, queries: Tensor, pool: Tensor, layer: int, place: Place) -> Tensor:
        num_kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        blocks = pool.view(-1, self._shape.block_size * 2 * num_kv_heads * head_dim)[layer:]
        mixed: list[Tensor] = []
        for group in place.groups:
            context = self._copy(blocks, group.blocks).view(group.num_rows, -1, 2, num_kv_heads, head_dim)
            keys, values = context[:, : group.context].permute(2, 0, 3, 1, 4)  # [g, K, context, D] each
            mine = queries[group.first : group.last]
            if group.tiles:
                mixed.extend(_attend_tile(mine, keys, values, tile) for tile in group.tiles)
            else:
                mixed.append(_attend_single(mine, keys, values, group.mask))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None:
        torch.index_select(pool, 0, blocks, out=out)

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
        pool.index_copy_(0, blocks.long(), rows)

    def _copy(self, blocks: Tensor, wanted: Tensor) -> Tensor:
        """Overwritten by the next copy."""
        size = wanted.numel() * blocks.shape[1]
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        dense = self._scratch[:size].view(wanted.numel(), -1)
        return torch.index_select(blocks, 0, wanted, out=dense)


def _attend_single(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[g, H, D] → [g, H * D]. Queries of one key/value head go side by side, so that heads need no repeating."""
    num_rows, num_kv_heads, _, head_dim = keys.shape
    grouped = queries.reshape(num_rows, num_kv_heads, -1, head_dim)
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(num_rows, -1)


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
    """[n, H, D] → [tile's n, H * D]."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_new, group = tile.last - tile.first, queries.shape[1] // num_kv_heads
    mine = queries[tile.first : tile.last].view(num_new, num_kv_heads, group, head_dim)
    mixed = functional.scaled_dot_product_attention(
        mine.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_new, head_dim),
        keys[:, :, : tile.end],
        values[:, :, : tile.end],
        attn_mask=tile.mask.repeat(group, 1),
    )
    return mixed.view(num_kv_heads, group, num_new, head_dim).permute(2, 0, 1, 3).reshape(num_new, -1)


def _groups(layout: Layout, num_layers: int) -> Iterator[Group]:
    firsts = layout.firsts.tolist()
    for first, last in single_groups(layout.contexts[: layout.num_single].tolist()):
        yield _single_group(layout, first, last, num_layers)
    for row in range(layout.num_single, len(layout.lengths)):
        context, num_new = int(layout.contexts[row]), int(layout.lengths[row])
        tiles = [
            _tile(context - num_new, offset, min(offset + QUERY_TILE, num_new))
            for offset in range(0, num_new, QUERY_TILE)
        ]
        blocks = _blocks(layout, row, row + 1, context, num_layers)
        yield Group(firsts[row], firsts[row + 1], 1, context, blocks, None, tuple(tiles))


def single_groups(contexts: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that attend together: as many as fit the cache, with little padding to the longest of them."""
    first = longest = padded = 0
    for row, context in enumerate(contexts):
        longer = max(longest, context)
        padded_then = padded + longer - context + (longer - longest) * (row - first)
        if row > first and (longer * (row - first + 1) > CONTEXT_TOKENS or padded_then > PADDED_TOKENS):
            yield first, row
            first, longer, padded_then = row, context, 0
        longest, padded = longer, padded_then
    if contexts:
        yield first, len(contexts)


def _single_group(layout: Layout, first: int, last: int, num_layers: int) -> Group:
    contexts = torch.from_numpy(layout.contexts[first:last])
    longest = int(contexts.max())
    mask = None
    if last - first > 1 and int(contexts.min()) < longest:
        hidden = torch.arange(longest) >= contexts[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None]
    return Group(first, last, last - first, longest, _blocks(layout, first, last, longest, num_layers), mask)


def _blocks(layout: Layout, first: int, last: int, context: int, num_layers: int) -> Tensor:
    used = -(-context // layout.block_size)
    return torch.from_numpy(layout.tables[first:last, :used].astype(numpy.int64).reshape(-1) * num_layers)


def _tile(past: int, first: int, last: int) -> Tile:
    seen = torch.arange(past + first, past + last)
    hidden = torch.arange(past + last) > seen[:, None]
    return Tile(first, last, past + last, torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf))
