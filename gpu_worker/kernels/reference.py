"""Paged attention in plain PyTorch: the truth beside which other kernels are tested, and what the CPU runs.

Knows tensors only. Shapes: T tokens, H query heads, K key/value heads, G = H / K, D head dim, S slots of a block.
A pool is [num_blocks, L, 2, K, S, D], contiguous; plane 0 of the third dimension holds keys, plane 1 values. Seen flat,
the vector of (block, layer, plane, head, slot) lies at ``(((block * L + layer) * 2 + plane) * K + head) * S + slot``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def write_kv(pool: Tensor, layer: int, slots: Tensor, keys_values: Tensor) -> None:
    """Store the keys and values of T tokens in one layer.

    ``slots`` [T * 2 * K]: flat vector index in layer 0 of each (token, plane, head). ``keys_values`` [T, 2, K, D].
    """
    _, _, _, num_heads, block_size, head_dim = pool.shape
    vectors = pool.view(-1, head_dim)
    vectors.index_copy_(0, slots + layer * 2 * num_heads * block_size, keys_values.reshape(-1, head_dim))


def attend(pool: Tensor, layer: int, chunks: Tensor, mask: Tensor, queries: Tensor, scratch: Tensor) -> Tensor:
    """Attention of g rows, each with n queries, against everything written for them so far. Returns [g * n, H * D].

    ``chunks`` [2 * g * K * b]: in layer 0, the flat index of each (plane, row, head, block) in units of S vectors.
    ``mask`` [g, 1, 1 or G * n, b * S]: 0 where a query may look, -inf elsewhere. ``queries`` [g * n, H, D].
    ``scratch``: at least ``chunks.numel() * S * D`` floats, overwritten. Masked slots must hold finite numbers.
    One copy of the rows' context per layer, in pieces of S * D floats, then a fused attention over dense tensors.
    """
    _, _, _, num_kv_heads, block_size, head_dim = pool.shape
    num_rows = mask.shape[0]
    num_queries, num_heads = queries.shape[0] // num_rows, queries.shape[1]
    group = num_heads // num_kv_heads
    gathered = scratch[: chunks.numel() * block_size * head_dim].view(chunks.numel(), block_size * head_dim)
    torch.index_select(pool.view(-1, block_size * head_dim), 0, chunks + layer * 2 * num_kv_heads, out=gathered)
    keys, values = gathered.view(2, num_rows, num_kv_heads, -1, head_dim)
    # queries of one key/value head side by side, so that heads need no repeating: [g, K, G * n, D]
    grouped = queries.view(num_rows, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows, num_kv_heads, group * num_queries, head_dim)
    mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    mixed = mixed.view(num_rows, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(num_rows * num_queries, num_heads * head_dim)
