"""One forward's input as tensors: rows of many requests, flattened and grouped for attention. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows with equally many new tokens and nearly equal context, side by side in the flattened tokens.

    ``[first, last)``: their flattened tokens. ``chunks`` and ``mask`` as ``kernels.reference.attend`` takes them.
    """

    first: int
    last: int
    chunks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Always: groups cover the tokens without gap or overlap; ``slots`` names no slot twice."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T * 2 * K] int64, as kernels.reference.write_kv takes them
    groups: tuple[AttentionGroup, ...]
    scratch: Tensor  # floats, large enough for the largest group
