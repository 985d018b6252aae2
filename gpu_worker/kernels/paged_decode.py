"""Triton: attention of one new token per row against its paged context, cut into parts, then one pass of reduction.

Bytes: 2 * K * D * sizeof(element) per token of context, read once; queries, results and, in float32, splits * H *
(D + 1) partial numbers per row beside them. Operations: 4 * H * D per token of context (a multiply-add counts two). At
G = 4 and bfloat16 that is 4 operations per byte: bound by memory on every device. See ``reference.attend_decode``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import SMALLEST_DOT, decode_configs, num_splits

LOG2_E = 1.4426950408889634


@triton.autotune(configs=decode_configs(), key=["HEAD_DIM", "GROUP", "BLOCK_SIZE"])
@triton.jit
def _attend_part(
    p_queries,
    p_pool,
    p_tables,
    p_contexts,
    p_partial,
    p_weight,
    scale,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_plane,
    stride_head,
    stride_slot,
    stride_table,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, key/value head, part): softmax over the part's tokens, not yet comparable with other parts."""
    i_row, i_head, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(p_contexts + i_row)
    per_split = tl.cdiv(tl.cdiv(context, NUM_SPLITS), TILE) * TILE
    first = i_split * per_split
    last = tl.minimum(first + per_split, context)

    o_group = tl.arange(0, GROUP_PADDED)
    o_dim = tl.arange(0, DIM_PADDED)
    o_tile = tl.arange(0, TILE)
    o_query_head = i_head * GROUP + o_group
    m_group, m_dim = o_group < GROUP, o_dim < HEAD_DIM
    p_query = p_queries + i_row * stride_query_row + o_query_head[:, None] * stride_query_head + o_dim[None, :]
    b_query = tl.load(p_query, mask=m_group[:, None] & m_dim[None, :], other=0.0)  # [G, D]
    p_head = p_pool + i_head.to(tl.int64) * stride_head

    b_best = tl.full((GROUP_PADDED,), -float("inf"), dtype=tl.float32)
    b_sum = tl.zeros((GROUP_PADDED,), dtype=tl.float32)
    b_mixed = tl.zeros((GROUP_PADDED, DIM_PADDED), dtype=tl.float32)
    for start in range(first, last, TILE):
        o_token = start + o_tile
        m_token = o_token < last
        b_block = tl.load(p_tables + i_row * stride_table + o_token // BLOCK_SIZE, mask=m_token, other=0).to(tl.int64)
        p_key = p_head + b_block * stride_block + (o_token % BLOCK_SIZE) * stride_slot
        m_key = m_token[:, None] & m_dim[None, :]
        b_key = tl.load(p_key[:, None] + o_dim[None, :], mask=m_key, other=0.0)  # [TILE, D]
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale
        b_score = tl.where(m_token[None, :], b_score, -float("inf"))
        b_higher = tl.maximum(b_best, tl.max(b_score, axis=1))  # finite: a turn has at least one token
        b_power = tl.exp2(b_score - b_higher[:, None])
        b_shrink = tl.exp2(b_best - b_higher)
        b_value = tl.load(p_key[:, None] + stride_plane + o_dim[None, :], mask=m_key, other=0.0)
        b_mixed = b_mixed * b_shrink[:, None]
        b_mixed += tl.dot(b_power.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_sum = b_sum * b_shrink + tl.sum(b_power, axis=1)
        b_best = b_higher

    is_empty = b_sum == 0.0  # a part beyond a short context
    b_mixed = b_mixed / tl.where(is_empty, 1.0, b_sum)[:, None]
    b_weight = tl.where(is_empty, -float("inf"), b_best + tl.log2(tl.where(is_empty, 1.0, b_sum)))
    o_partial = (i_row * NUM_HEADS + o_query_head) * NUM_SPLITS + i_split
    tl.store(p_weight + o_partial, b_weight, mask=m_group)
    p_out = p_partial + o_partial[:, None] * HEAD_DIM + o_dim[None, :]
    tl.store(p_out, b_mixed, mask=m_group[:, None] & m_dim[None, :])


@triton.jit
def _add_parts(
    p_partial,
    p_weight,
    p_out,
    stride_out_row,
    stride_out_head,
    NUM_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Program (row, query head): the parts' results, weighted by their share of the softmax."""
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_split, o_dim = tl.arange(0, NUM_SPLITS), tl.arange(0, DIM_PADDED)
    m_dim = o_dim < HEAD_DIM
    o_partial = (i_row * NUM_HEADS + i_head) * NUM_SPLITS + o_split
    b_weight = tl.load(p_weight + o_partial)
    b_best = tl.max(b_weight, axis=0)
    b_best = tl.where(b_best == -float("inf"), 0.0, b_best)  # a row of context 0: all weights become 0
    b_share = tl.exp2(b_weight - b_best)
    b_sum = tl.sum(b_share, axis=0)
    b_partial = tl.load(p_partial + o_partial[:, None] * HEAD_DIM + o_dim[None, :], mask=m_dim[None, :], other=0.0)
    b_mixed = tl.sum(b_partial * b_share[:, None], axis=0) / tl.where(b_sum == 0.0, 1.0, b_sum)
    p_row = p_out + i_row * stride_out_row + i_head * stride_out_head + o_dim
    tl.store(p_row, b_mixed.to(p_out.dtype.element_ty), mask=m_dim)


def attend_decode(
    queries: Tensor,
    layer_pool: Tensor,
    tables: Tensor,
    contexts: Tensor,
    out: Tensor,
    *,
    splits: int | None = None,
) -> None:
    """See ``reference.attend_decode``; ``contexts`` int32. ``splits``: a power of two, else as fits the device."""
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, block_size = layer_pool.shape[3], layer_pool.shape[1]
    group = num_heads // num_kv_heads
    splits = splits or num_splits(num_rows, num_kv_heads, _num_processors(queries.device))
    partial = torch.empty(num_rows, num_heads, splits, head_dim, dtype=torch.float32, device=queries.device)
    weight = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=queries.device)
    stride_block, stride_slot, stride_plane, stride_head, _ = layer_pool.stride()
    dim_padded = max(SMALLEST_DOT, triton.next_power_of_2(head_dim))
    _attend_part[(num_rows, num_kv_heads, splits)](
        queries,
        layer_pool,
        tables,
        contexts,
        partial,
        weight,
        LOG2_E / head_dim**0.5,
        queries.stride(0),
        queries.stride(1),
        stride_block,
        stride_plane,
        stride_head,
        stride_slot,
        tables.stride(0),
        NUM_SPLITS=splits,
        NUM_HEADS=num_heads,
        GROUP=group,
        GROUP_PADDED=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
    )
    _add_parts[(num_rows, num_heads)](
        partial,
        weight,
        out,
        out.stride(0),
        out.stride(1),
        NUM_SPLITS=splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        num_warps=1,
    )


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
