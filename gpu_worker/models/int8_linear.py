"""Linear layers with weights of 8 bits on a CPU, rows quantised as they come. Knows matrices only.

A weight's row and an input's row each have one scale, so that a row's product does not depend on the rows beside it.
Two kernels do it, oneDNN's and FBGEMM's; the latter's packing goes through torch's quantised tensors, which are
announced to go. Both sum products of bytes in 32 bits where the CPU can (VNNI, AMX). A CPU that cannot adds pairs of
them in 16 bits first: there weights keep 7 bits, so that a pair always fits and sums are exact again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 127
LARGEST_OF_PAIRS = 64  # of a weight where pairs add up in 16 bits: 2 * 255 * 64 fits
MIDDLE = 128  # the byte that stands for zero in an input
TINY = 1e-30  # a row of zeros stays one

Product = Callable[[Tensor], Tensor]
"""Rows [N, in], divided by their scales and so within [-1, 1], → their product [N, out]."""
Pack = Callable[[Tensor, Tensor], Product]
"""Weights [out, in] of int8 and their scales [out] → the product by them."""


class Int8Linear:
    """``x @ weight.T + bias`` for float32 [N, in]. Always: a row's whole-number sums depend on that row alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        packing = _packing()
        if packing is None:
            raise NotImplementedError("this build of torch has no int8 product for this CPU")
        pack, largest = packing
        scales = weight.abs().amax(dim=1).clamp_(min=TINY).div_(largest)
        rounded = (weight / scales[:, None]).round_().to(torch.int8)
        self._product = pack(rounded, scales)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` [N, in] → [N, out]."""
        largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=TINY)
        product = self._product(rows / largest).mul_(largest)
        return product if self._bias is None else product.add_(self._bias)


def is_available() -> bool:
    """Whether this torch multiplies bytes on this CPU, exactly."""
    return _packing() is not None


@functools.cache
def _packing() -> tuple[Pack, int] | None:
    """How to pack, and the largest weight that sums exactly: 8 bits by either kernel before 7 bits by either."""
    for largest in (LARGEST, LARGEST_OF_PAIRS):
        for pack in (_pack_onednn, _pack_fbgemm):
            if is_exact(pack, largest):
                return pack, largest
    return None


def is_exact(pack: Pack, largest: int) -> bool:
    """Whether this kernel is here and adds up the sums that overflow first."""
    try:
        product = pack(torch.full((16, 64), largest, dtype=torch.int8), torch.ones(16))
        return torch.allclose(product(torch.ones(3, 64)), torch.tensor(64.0 * largest))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def _pack_onednn(weight: Tensor, scales: Tensor) -> Product:
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    zeros = torch.zeros(len(scales), dtype=torch.int64)

    def product(rows: Tensor) -> Tensor:
        quantised = rows.mul(LARGEST).add_(MIDDLE).round_().to(torch.uint8)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised, 1 / LARGEST, MIDDLE, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found

    return product


def _pack_fbgemm(weight: Tensor, scales: Tensor) -> Product:
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        torch.backends.quantized.engine = "fbgemm"
        try:
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            quantised = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
            packed = torch.ops.quantized.linear_prepack(quantised, None)
        finally:
            torch.backends.quantized.engine = engine

    def product(rows: Tensor) -> Tensor:
        found: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1 / LARGEST, MIDDLE, packed
        )
        return found

    return product
