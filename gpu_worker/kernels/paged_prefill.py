"""Triton: attention of chunks of new tokens against their paged past and themselves.

A program holds PREFILL_TILE (query, head of the group) pairs of one key/value head, so that keys and values are read
once per tile of queries, not once per head. Operations: 4 * H * D per pair of a query and a token it sees (a
multiply-add counts two), half of the square of the chunk plus chunk times past. Bytes: 2 * K * D * sizeof(element) per
token of context for every tile. Bound by operations from some 100 queries on. See ``reference.attend_prefill``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import PREFILL_TILE, SMALLEST_DOT, prefill_configs

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which program does what: tile i holds queries of row ``rows[i]`` from its ``offsets[i]``-th new token on."""

    rows: Tensor  # [tiles] int32
    offsets: Tensor  # [tiles] int32


def tiles_of(lengths: Sequence[int], group: int, device: torch.device | str, tile: int = PREFILL_TILE) -> Tiles:
    """Tiles that cover chunks of ``lengths`` new tokens, the longest contexts' tiles last in each chunk."""
    step = queries_per_tile(group, tile)
    cut = [(row, offset) for row, length in enumerate(lengths) for offset in range(0, length, step)]
    rows, offsets = torch.tensor(cut, dtype=torch.int32).reshape(-1, 2).unbind(dim=1)
    return Tiles(rows.contiguous().to(device), offsets.contiguous().to(device))


def queries_per_tile(group: int, tile: int = PREFILL_TILE) -> int:
    """A group that does not divide the tile leaves its last places idle."""
    return max(1, tile // group)


@triton.jit
def _attend_tokens(
    b_query,
    b_best,
    b_sum,
    b_mixed,
    p_head,
    p_table,
    first,
    last,
    b_last_seen,
    scale,
    stride_block,
    stride_plane,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    IS_SEEN_BY_ALL: tl.constexpr,
):
    """Tokens ``[first, last)`` of the context added to a running softmax."""
    o_dim, o_tile = tl.arange(0, DIM_PADDED), tl.arange(0, TILE)
    m_dim = o_dim < HEAD_DIM
    for start in range(first, last, TILE):
        o_token = start + o_tile
        m_token = o_token < last
        b_block = tl.load(p_table + o_token // BLOCK_SIZE, mask=m_token, other=0).to(tl.int64)
        p_key = p_head + b_block * stride_block + (o_token % BLOCK_SIZE) * stride_slot
        m_key = m_token[:, None] & m_dim[None, :]
        b_key = tl.load(p_key[:, None] + o_dim[None, :], mask=m_key, other=0.0)  # [TILE, D]
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale
        if IS_SEEN_BY_ALL:
            b_score = tl.where(m_token[None, :], b_score, -float("inf"))
        else:
            b_score = tl.where(o_token[None, :] <= b_last_seen[:, None], b_score, -float("inf"))
        b_higher = tl.maximum(b_best, tl.max(b_score, axis=1))
        b_anchor = tl.where(b_higher == -float("inf"), 0.0, b_higher)  # an idle place, or nothing seen so far
        b_power = tl.exp2(b_score - b_anchor[:, None])
        b_shrink = tl.exp2(b_best - b_anchor)
        b_value = tl.load(p_key[:, None] + stride_plane + o_dim[None, :], mask=m_key, other=0.0)
        b_mixed = b_mixed * b_shrink[:, None]
        b_mixed += tl.dot(b_power.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_sum = b_sum * b_shrink + tl.sum(b_power, axis=1)
        b_best = b_higher
    return b_best, b_sum, b_mixed


@triton.autotune(configs=prefill_configs(), key=["HEAD_DIM", "GROUP", "BLOCK_SIZE"])
@triton.jit
def _attend_tile(
    p_queries,
    p_pool,
    p_tables,
    p_contexts,
    p_firsts,
    p_tile_rows,
    p_tile_offsets,
    p_out,
    scale,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_plane,
    stride_head,
    stride_slot,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PLACES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (tile, key/value head)."""
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(p_tile_rows + i_tile).to(tl.int64)
    offset = tl.load(p_tile_offsets + i_tile)
    context = tl.load(p_contexts + row)
    first_token = tl.load(p_firsts + row)
    num_new = tl.load(p_firsts + row + 1) - first_token
    past = context - num_new

    o_place, o_dim = tl.arange(0, PLACES), tl.arange(0, DIM_PADDED)
    o_new = offset + o_place // GROUP
    m_place = (o_new < num_new) & (o_place < QUERIES * GROUP)
    m_query = m_place[:, None] & (o_dim < HEAD_DIM)[None, :]
    o_token = (first_token + o_new).to(tl.int64)
    o_head = i_head * GROUP + o_place % GROUP
    p_query = p_queries + (o_token * stride_query_token + o_head * stride_query_head)[:, None] + o_dim[None, :]
    b_query = tl.load(p_query, mask=m_query, other=0.0)
    b_last_seen = tl.where(m_place, past + o_new, -1)

    b_best = tl.full((PLACES,), -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros((PLACES,), dtype=tl.float32)
    b_mixed = tl.zeros((PLACES, DIM_PADDED), dtype=tl.float32)
    p_head = p_pool + i_head.to(tl.int64) * stride_head
    p_table = p_tables + row * stride_table
    seen_by_all = (past + offset + 1) // TILE * TILE  # whole turns need no comparison
    end = past + tl.minimum(offset + QUERIES, num_new)
    b_best, b_sum, b_mixed = _attend_tokens(
        b_query, b_best, b_sum, b_mixed, p_head, p_table, 0, seen_by_all, b_last_seen, scale,
        stride_block, stride_plane, stride_slot, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, PRECISION, TILE, True,
    )  # fmt: skip
    b_best, b_sum, b_mixed = _attend_tokens(
        b_query, b_best, b_sum, b_mixed, p_head, p_table, seen_by_all, end, b_last_seen, scale,
        stride_block, stride_plane, stride_slot, HEAD_DIM, DIM_PADDED, BLOCK_SIZE, PRECISION, TILE, False,
    )  # fmt: skip
    b_mixed = b_mixed / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    p_place = p_out + (o_token * stride_out_token + o_head * stride_out_head)[:, None] + o_dim[None, :]
    tl.store(p_place, b_mixed.to(p_out.dtype.element_ty), mask=m_query)


def attend_prefill(
    queries: Tensor,
    layer_pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    firsts: Tensor,
    out: Tensor,
    *,
    tiles: Tiles,
    tile: int = PREFILL_TILE,
) -> None:
    """See ``reference.attend_prefill``; ``contexts`` and ``firsts`` int32. ``tiles``: of the same rows and ``tile``."""
    num_heads, head_dim = queries.shape[1:]
    num_kv_heads, block_size = layer_pool.shape[3], layer_pool.shape[1]
    group = num_heads // num_kv_heads
    stride_block, stride_slot, stride_plane, stride_head, _ = layer_pool.stride()
    _attend_tile[(len(tiles.rows), num_kv_heads)](
        queries,
        layer_pool,
        tables,
        contexts,
        firsts,
        tiles.rows,
        tiles.offsets,
        out,
        LOG2_E / head_dim**0.5,
        queries.stride(0),
        queries.stride(1),
        stride_block,
        stride_plane,
        stride_head,
        stride_slot,
        tables.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        QUERIES=queries_per_tile(group, tile),
        PLACES=max(SMALLEST_DOT, triton.next_power_of_2(max(group, tile))),
        HEAD_DIM=head_dim,
        DIM_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
    )
