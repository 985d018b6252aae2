"""A linear layer whose weight is packed once for the CPU's matrix kernel. Knows matrices only."""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as functional
from torch import Tensor

WIDE_BATCH = 4  # from here on mm(W, x.T).T reads an unpacked weight faster (1.3-2.6x measured for an LM head)
FEW_ROWS = 4  # the packed kernel takes a row or two longer than four (1.1-1.4x measured), so fewer are filled up
TYPICAL_BATCH = 32  # a hint for the packing; any batch may be multiplied
# Of oneDNN and of torch's layer over it. Each keeps what it compiled for one shape, about 1 MB for SmolLM2, and 1,024
# of them unless told otherwise; a batch size takes five. The steps of sixteen that decode fit in 128.
SHAPES_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}


def keep_few_shapes() -> None:
    """Bounds what products of ever new batch sizes leave behind. Heard only before the process's first product."""
    for name, capacity in SHAPES_KEPT.items():
        os.environ.setdefault(name, capacity)


class PackedLinear:
    """``x @ weight.T + bias`` for float32 [N, in]. Always: holds the weight packed where torch can pack it.

    oneDNN's packed kernel was 1.0-2.6x as fast as ``functional.linear`` at batch 4 to 64 (no repacking in each call),
    but 1.2-1.5x as slow for a single row. Filled up to FEW_ROWS it was as quick as that, or quicker, on one machine;
    ``with_spare`` keeps the plain weight beside it for single rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, with_spare: bool = False) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_BATCH) if can_pack() else None
        self._plain = weight if with_spare or self._packed is None else None
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` [N, in] → [N, out]."""
        if self._packed is not None and (self._plain is None or rows.shape[0] > 1):
            num_rows = rows.shape[0]
            if num_rows < FEW_ROWS:
                rows = functional.pad(rows, (0, 0, 0, FEW_ROWS - num_rows))
            product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            return product[:num_rows]
        assert self._plain is not None
        if self._bias is None and rows.shape[0] >= WIDE_BATCH:
            return torch.mm(self._plain, rows.T).T
        return functional.linear(rows, self._plain, self._bias)


@functools.cache
def can_pack() -> bool:
    """Whether this torch carries the packed kernel; the operators are private, so it is tried on a small product."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, rows = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(product, functional.linear(rows, weight))
