"""Triton: silu(gate) * up, out of the fused product of both.

Bytes: 3 * I * sizeof(element) per token (two read, one written). Operations: 5 * I per token. Bound by memory. See
``reference.swiglu``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import SWIGLU_TILE


@triton.jit
def _swiglu(p_gate_up, p_out, stride_gate_up, stride_out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program (token, tile)."""
    i_token = tl.program_id(0).to(tl.int64)
    o_tile = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_tile = o_tile < SIZE
    p_gate = p_gate_up + i_token * stride_gate_up + o_tile
    b_gate = tl.load(p_gate, mask=m_tile, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + SIZE, mask=m_tile, other=0.0).to(tl.float32)
    b_mixed = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(p_out + i_token * stride_out + o_tile, b_mixed.to(p_out.dtype.element_ty), mask=m_tile)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """See ``reference.swiglu``; dense in the last dimension."""
    num_tokens, size = out.shape
    _swiglu[(num_tokens, triton.cdiv(size, SWIGLU_TILE))](
        gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, TILE=SWIGLU_TILE, num_warps=4
    )
