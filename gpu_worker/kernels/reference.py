"""Every kernel in plain PyTorch, slow and clear: the truth beside which the others are tested. Knows tensors only.

Shapes: T tokens, R rows (requests), H query heads, K key/value heads, G = H / K, D head dim, S slots of a block. One
layer's keys and values are a view ``layer_pool`` [num_blocks, S, 2, K, D], dense in the last dimension; plane 0 holds
keys, plane 1 values. A row's token at position p lives in slot p % S of block ``tables[row, p // S]``.
Arithmetic is float32 whatever the tensors hold; results are rounded once, at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, out: Tensor, residual: Tensor | None = None) -> None:
    """``out = rows / sqrt(mean(rows²) + epsilon) * weight`` over the last dimension (Zhang and Sennrich 2019).

    With ``residual`` it first becomes ``residual + rows``, in place, and its sum is what is normed.
    """
    if residual is not None:
        residual.copy_(residual.float() + rows.float())
        rows = residual
    exact = rows.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + epsilon)
    out.copy_(exact * scale * weight.float())


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """``gate_up`` [T, 2 * I], gates first → ``out`` [T, I] = silu(gate) * up (Shazeer 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def rotate_and_write(
    fused: Tensor,
    slots: Tensor,
    turns: Tensor,
    layer_pool: Tensor,
    queries: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Turn queries and keys by their tokens' angles; store queries in ``queries``, keys and values in the pool.

    ``fused`` [T, H + 2 * K, D]: query, key and value heads. ``slots`` [T] int64: block * S + slot, -1 = nowhere.
    ``turns`` [T, 2, D / 2] float32: cosines and sines of the token's angles; dimension i turns with i + D / 2.
    ``queries`` [T, H, D]. ``norms``: weights [D] of queries and keys and the epsilon, applied first (Qwen 3).
    """
    num_heads, num_kv_heads, block_size = queries.shape[1], layer_pool.shape[3], layer_pool.shape[1]
    exact = fused.float()
    turned, values = exact[:, : num_heads + num_kv_heads], exact[:, num_heads + num_kv_heads :]
    if norms is not None:
        query_norm, key_norm, epsilon = norms
        weights = torch.cat((query_norm.expand(num_heads, -1), key_norm.expand(num_kv_heads, -1))).float()
        turned = turned * torch.rsqrt(turned.square().mean(dim=-1, keepdim=True) + epsilon) * weights
    cos, sin = turns.unbind(dim=1)
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    queries.copy_(turned[:, :num_heads])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = layer_pool[slot // block_size, slot % block_size]
            place.copy_(torch.stack((turned[token, num_heads:], values[token])))


def context_of(layer_pool: Tensor, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values [K, num_tokens, D] of one row, float32. ``table``: its blocks."""
    blocks = layer_pool[table[: -(-num_tokens // layer_pool.shape[1])].long()].float()  # [b, S, 2, K, D]
    keys, values = blocks.flatten(0, 1)[:num_tokens].permute(1, 2, 0, 3)
    return keys, values


def attend_decode(queries: Tensor, layer_pool: Tensor, tables: Tensor, contexts: Tensor, out: Tensor) -> None:
    """One new token per row: ``queries`` [R, H, D] against the row's ``contexts[r]`` tokens → ``out`` [R, H, D].

    softmax(q kᵀ / sqrt(D)) v. ``tables`` [R, blocks] int32. A row of context 0 gets zeros.
    """
    firsts = torch.arange(len(contexts) + 1)
    attend_prefill(queries, layer_pool, tables, contexts, firsts, out)


def attend_prefill(
    queries: Tensor, layer_pool: Tensor, tables: Tensor, contexts: Tensor, firsts: Tensor, out: Tensor
) -> None:
    """Chunks against their past and themselves: token i of n in a chunk sees its row's first ``context - n + i + 1``.

    ``queries`` [T, H, D]: row r's chunk is ``[firsts[r], firsts[r + 1])``; its keys and values are in the pool already.
    ``contexts`` [R]: the row's tokens, the chunk among them. ``out`` [T, H, D].
    """
    bounds = firsts.tolist()
    for row, context in enumerate(contexts.tolist()):
        mine = slice(bounds[row], bounds[row + 1])
        if not context:
            out[mine] = 0
            continue
        num_new, num_heads, head_dim = queries[mine].shape
        keys, values = (
            side.repeat_interleave(num_heads // layer_pool.shape[3], dim=0)
            for side in context_of(layer_pool, tables[row], context)
        )
        scores = queries[mine].float().transpose(0, 1) @ keys.transpose(1, 2) / head_dim**0.5  # [H, n, context]
        last_seen = torch.arange(context - num_new, context, device=scores.device)
        hidden = torch.arange(context, device=scores.device) > last_seen[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[mine] = (weights @ values).transpose(0, 1).to(out.dtype)


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """``out[i] = pool[blocks[i]]``: whole blocks, bit by bit."""
    out.copy_(pool[blocks.long()])


def scatter_blocks(pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """``pool[blocks[i]] = rows[i]``. ``blocks`` names no block twice."""
    pool[blocks.long()] = rows
