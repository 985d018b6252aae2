"""One forward's input as tensors: the new tokens of many rows, flattened; and the shape of the pool they write to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpu_worker.kernels.layout import PoolShape
from gpu_worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """``token_ids`` and ``positions`` [T] int64. ``place``: made by the kernels that will run it."""

    token_ids: Tensor
    positions: Tensor
    place: Any


def pool_shape(config: ModelConfig, block_size: int) -> PoolShape:
    """Of the pool that holds this model's keys and values."""
    return PoolShape(config.num_layers, block_size, config.num_heads, config.num_kv_heads, config.head_dim)
