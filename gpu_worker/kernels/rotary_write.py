"""Triton: rotary embedding of queries and keys, and the write of keys and values into their blocks, in one pass.

Bytes: 2 * (H + 2 * K) * D * sizeof(element) per token, read once and written once, and 4 * D of cosines and sines.
Operations: 3 * (H + K) * D per token; with norms 4 more each. Bound by memory. See ``reference.rotate_and_write``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import ROTATE_HEADS


@triton.jit
def _rotate_and_write(
    p_fused,
    p_slots,
    p_turns,
    p_pool,
    p_queries,
    p_query_norm,
    p_key_norm,
    epsilon,
    stride_fused_token,
    stride_fused_head,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_plane,
    stride_head,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (token, HEADS of the H + 2 * K heads)."""
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_half = tl.arange(0, HALF_PADDED)
    m_half = o_half < HALF
    m_all = (o_head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & m_half[None, :]
    is_query, is_value = o_head < NUM_HEADS, o_head >= NUM_HEADS + NUM_KV_HEADS

    p_first = p_fused + i_token * stride_fused_token + o_head[:, None] * stride_fused_head + o_half[None, :]
    b_first = tl.load(p_first, mask=m_all, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HALF, mask=m_all, other=0.0).to(tl.float32)
    if HAS_NORMS:
        b_square = tl.sum(b_first * b_first + b_second * b_second, axis=1) / (2 * HALF)
        b_scale = tl.where(is_value, 1.0, tl.rsqrt(b_square + epsilon))[:, None]
        m_norm = m_all & ~is_value[:, None]
        p_norm = tl.where(is_query[:, None], p_query_norm + o_half[None, :], p_key_norm + o_half[None, :])
        b_first *= b_scale * tl.load(p_norm, mask=m_norm, other=1.0).to(tl.float32)
        b_second *= b_scale * tl.load(p_norm + HALF, mask=m_norm, other=1.0).to(tl.float32)

    p_turn = p_turns + i_token * (2 * HALF) + o_half
    b_cos = tl.load(p_turn, mask=m_half, other=1.0)[None, :]
    b_sin = tl.load(p_turn + HALF, mask=m_half, other=0.0)[None, :]
    b_cos, b_sin = tl.where(is_value[:, None], 1.0, b_cos), tl.where(is_value[:, None], 0.0, b_sin)
    b_turned = b_first * b_cos - b_second * b_sin
    b_turned_second = b_second * b_cos + b_first * b_sin

    p_query = p_queries + i_token * stride_query_token + o_head[:, None] * stride_query_head + o_half[None, :]
    m_query = m_all & is_query[:, None]
    tl.store(p_query, b_turned.to(p_queries.dtype.element_ty), mask=m_query)
    tl.store(p_query + HALF, b_turned_second.to(p_queries.dtype.element_ty), mask=m_query)

    slot = tl.load(p_slots + i_token)  # int64
    m_kv = m_all & ~is_query[:, None] & (slot >= 0)
    slot = tl.maximum(slot, 0)
    o_kv_head = o_head - NUM_HEADS
    o_plane = o_kv_head // NUM_KV_HEADS
    p_slot = p_pool + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    o_place = o_plane * stride_plane + o_kv_head % NUM_KV_HEADS * stride_head
    p_kv = p_slot + o_place[:, None] + o_half[None, :]
    tl.store(p_kv, b_turned.to(p_pool.dtype.element_ty), mask=m_kv)
    tl.store(p_kv + HALF, b_turned_second.to(p_pool.dtype.element_ty), mask=m_kv)


def rotate_and_write(
    fused: Tensor,
    slots: Tensor,
    turns: Tensor,
    layer_pool: Tensor,
    queries: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """See ``reference.rotate_and_write``."""
    num_tokens, num_all, head_dim = fused.shape
    query_norm, key_norm, epsilon = norms or (turns, turns, 0.0)
    stride_block, stride_slot, stride_plane, stride_head, _ = layer_pool.stride()
    heads = min(ROTATE_HEADS, triton.next_power_of_2(num_all))
    _rotate_and_write[(num_tokens, triton.cdiv(num_all, heads))](
        fused,
        slots,
        turns,
        layer_pool,
        queries,
        query_norm,
        key_norm,
        epsilon,
        fused.stride(0),
        fused.stride(1),
        queries.stride(0),
        queries.stride(1),
        stride_block,
        stride_plane,
        stride_head,
        stride_slot,
        NUM_HEADS=queries.shape[1],
        NUM_KV_HEADS=layer_pool.shape[3],
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=layer_pool.shape[1],
        HAS_NORMS=norms is not None,
        HEADS=heads,
        num_warps=4,
    )
