"""Triton: root mean square norm of rows, and the residual's sum before it where one is given.

Bytes: 2 * hidden * sizeof(element) per row (read, write), 4 * with a residual. Operations: 4 * hidden per row. Bound by
memory. See ``reference.rms_norm``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.kernels.tuning import row_warps


@triton.jit
def _rms_norm(
    p_rows,
    p_weight,
    p_residual,
    p_out,
    epsilon,
    stride_row,
    stride_residual,
    stride_out,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Program (row)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_size = tl.arange(0, SIZE_PADDED)
    m_size = o_size < SIZE
    b_row = tl.load(p_rows + i_row * stride_row + o_size, mask=m_size, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_sum = p_residual + i_row * stride_residual + o_size
        b_row += tl.load(p_sum, mask=m_size, other=0.0).to(tl.float32)
        b_stored = b_row.to(p_residual.dtype.element_ty)
        tl.store(p_sum, b_stored, mask=m_size)
        b_row = b_stored.to(tl.float32)  # what is kept is what is normed
    b_scale = tl.rsqrt(tl.sum(b_row * b_row, axis=0) / SIZE + epsilon)
    b_weight = tl.load(p_weight + o_size, mask=m_size, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * stride_out + o_size, (b_row * b_scale * b_weight).to(p_out.dtype.element_ty), mask=m_size)


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float, out: Tensor, residual: Tensor | None = None) -> None:
    """See ``reference.rms_norm``; rows of [T, hidden], dense in the last dimension."""
    num_rows, size = rows.shape
    padded = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        rows,
        weight,
        rows if residual is None else residual,
        out,
        epsilon,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        SIZE=size,
        SIZE_PADDED=padded,
        HAS_RESIDUAL=residual is not None,
        num_warps=row_warps(padded),
    )
