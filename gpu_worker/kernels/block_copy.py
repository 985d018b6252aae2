"""Triton: scattered blocks of a pool into one dense piece and back, so that a swap is one copy over the bus.

Bytes: 2 * block per block (read, write). No operations. Bound by memory. See ``reference.gather_blocks``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import COPY_TILE


@triton.jit
def _copy_blocks(
    p_source, p_target, p_blocks, stride_source, stride_target, size, FROM_POOL: tl.constexpr, TILE: tl.constexpr
):
    """Program (block, tile)."""
    i_place = tl.program_id(0).to(tl.int64)
    o_tile = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    m_tile = o_tile < size
    block = tl.load(p_blocks + i_place).to(tl.int64)
    o_source = (block if FROM_POOL else i_place) * stride_source + o_tile
    o_target = (i_place if FROM_POOL else block) * stride_target + o_tile
    tl.store(p_target + o_target, tl.load(p_source + o_source, mask=m_tile, other=0.0), mask=m_tile)


def gather_blocks(pool: Tensor, blocks: Tensor, out: Tensor) -> None:
    """See ``reference.gather_blocks``; each block of ``pool`` and of ``out`` is one piece of memory."""
    _copy(pool, out, blocks, from_pool=True)


def scatter_blocks(pool: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """See ``reference.scatter_blocks``; each block of ``pool`` and of ``rows`` is one piece of memory."""
    _copy(rows, pool, blocks, from_pool=False)


def _copy(source: Tensor, target: Tensor, blocks: Tensor, *, from_pool: bool) -> None:
    size = source[0].numel()
    _copy_blocks[(len(blocks), triton.cdiv(size, COPY_TILE))](
        source,
        target,
        blocks,
        source.stride(0),
        target.stride(0),
        size,
        FROM_POOL=from_pool,
        TILE=COPY_TILE,
        num_warps=8,
    )
