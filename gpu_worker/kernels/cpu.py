"""What a CPU runs: torch's operators in an order that keeps a row's context in the cache. Knows tensors only.

Attention copies the context of one row, of one layer, into a dense piece and attends to it there: memory is read once,
the copy hardly leaves the cache, and dense operands are what torch multiplies fastest. No row is padded to another's
length. With ``in_place`` rows of one new token go without the copy; chunks, which are mostly products, keep it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.kernels.choice import Norms
from gpu_worker.kernels.in_place import InPlace
from gpu_worker.kernels.layout import Layout, PoolShape

QUERY_TILE = 128  # queries of a chunk that attend together; later tokens are not looked at


@dataclass(frozen=True, slots=True)
class Tile:
    """New tokens ``[first, last)`` of a row. ``mask`` [n, end]: 0 where one may look, -inf elsewhere."""

    first: int
    last: int
    end: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One request's new tokens, ``[first, last)`` of the step's: a single one, or a chunk in ``tiles``.

    ``blocks`` [b] int64: layer 0 of its blocks. ``dense`` [b, block]: where a layer of them is copied to; ``keys``
    [K, D, context] and ``values`` [K, context, D] look into that copy. All rows share its memory.
    """

    first: int
    last: int
    blocks: Tensor
    dense: Tensor
    keys: Tensor
    values: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """``slots`` [T] int64: each new token's place among the pool's tokens of layer 0. Single tokens come first.

    ``rows`` are those whose contexts are copied: all of them, or chunks alone.
    """

    slots: Tensor
    layout: Layout
    num_single: int
    rows: tuple[Row, ...]


class CpuKernels:
    """See ``Kernels``. Float32."""

    def __init__(self, shape: PoolShape, in_place: InPlace | None = None) -> None:
        """``in_place``: what attends for rows of one new token, where there is such a kernel."""
        self._shape = shape
        self._in_place = in_place
        self._scratch = torch.empty(0)

    @property
    def described(self) -> str:
        if self._in_place is None:
            return "attention copies contexts first (numba, in the extra [cpu], would read them in place)"
        return "attention reads contexts in place"

    def place(self, layout: Layout) -> Place:
        blocks, slots = layout.places()
        tokens = blocks * self._shape.num_layers * layout.block_size + slots
        num_single = layout.num_single
        copied = range(num_single if self._in_place is not None else 0, len(layout.contexts))
        return Place(torch.from_numpy(tokens), layout, num_single, tuple(self._rows(layout, copied)))

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
        shape, single = self._shape, place.num_single
        mixed = torch.empty(queries.shape)
        if self._in_place is not None and single:
            tables, contexts = place.layout.tables[:single], place.layout.contexts[:single]
            self._in_place(queries[:single], pool, layer, tables, contexts, mixed[:single])
        if place.rows:
            # Queries of one key/value head go side by side, so that heads need no repeating.
            sides = (len(queries), shape.num_kv_heads, shape.group, shape.head_dim)
            self._attend_copied(queries.view(sides), pool, layer, place, mixed.view(sides))
        return mixed.flatten(1)

    def _attend_copied(self, queries: Tensor, pool: Tensor, layer: int, place: Place, mixed: Tensor) -> None:
        """``queries`` and ``mixed`` [T, K, G, D]."""
        shape = self._shape
        blocks = pool.view(-1, shape.block_size * 2 * shape.num_kv_heads * shape.head_dim)[layer:]
        scaled, into = queries[: place.num_single].mul(shape.head_dim**-0.5).unbind(), mixed.unbind()
        for row in place.rows:
            torch.index_select(blocks, 0, row.blocks, out=row.dense)
            if row.tiles:
                _attend_chunk(row, queries[row.first : row.last], mixed[row.first : row.last])
            else:
                weights = torch.bmm(scaled[row.first], row.keys).softmax(dim=-1)
                torch.bmm(weights, row.values, out=into[row.first])

    def gather_blocks(self, pool: Tensor, blocks: Tensor, out: Tensor) -> None:
        torch.index_select(pool, 0, blocks, out=out)

    def scatter_blocks(self, pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
        pool.index_copy_(0, blocks.long(), rows)

    def _rows(self, layout: Layout, copied: range) -> Iterator[Row]:
        shape, firsts = self._shape, layout.firsts.tolist()
        contexts = layout.contexts.tolist()
        block = layout.block_size * 2 * shape.num_kv_heads * shape.head_dim
        most = max((-(-contexts[row] // layout.block_size) for row in copied), default=0) * block
        if self._scratch.numel() < most:
            self._scratch = torch.empty(most)
        for row in copied:
            first, last, context = firsts[row], firsts[row + 1], contexts[row]
            num_blocks = -(-context // layout.block_size)
            blocks = layout.tables[row, :num_blocks].astype(numpy.int64) * shape.num_layers
            dense = self._scratch[: num_blocks * block].view(num_blocks, block)
            tokens = dense.view(-1, 2, shape.num_kv_heads, shape.head_dim)[:context]
            keys, values = tokens[:, 0].permute(1, 2, 0), tokens[:, 1].transpose(0, 1)
            tiles = tuple(_tiles(context, last - first)) if last - first > 1 else ()
            yield Row(first, last, torch.from_numpy(blocks), dense, keys, values, tiles)


def _attend_chunk(row: Row, queries: Tensor, mixed: Tensor) -> None:
    """``queries`` [n, K, G, D] → ``mixed``, of the same shape."""
    _, num_kv_heads, group, head_dim = queries.shape
    keys, values = row.keys.transpose(1, 2)[None], row.values[None]
    for tile in row.tiles:
        num_new = tile.last - tile.first
        sides = queries[tile.first : tile.last].permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_new, head_dim)
        found = functional.scaled_dot_product_attention(
            sides,
            keys[:, :, : tile.end],
            values[:, :, : tile.end],
            attn_mask=tile.mask.repeat(group, 1),
        )
        mixed[tile.first : tile.last] = found.view(num_kv_heads, group, num_new, head_dim).permute(2, 0, 1, 3)


def _tiles(context: int, num_new: int) -> Iterator[Tile]:
    past = context - num_new
    for first in range(0, num_new, QUERY_TILE):
        last = min(first + QUERY_TILE, num_new)
        hidden = torch.arange(past + last) > torch.arange(past + first, past + last)[:, None]
        yield Tile(first, last, past + last, torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf))
