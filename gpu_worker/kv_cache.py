"""Two pools of KV blocks, device and host, and the copies between them. Knows blocks; refuses to know who owns them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy
import torch
from torch import Tensor

from gpu_worker.models.batch import pool_shape
from gpu_worker.models.config import ModelConfig
from scheduler_engine.plan import BlockCopy
from scheduler_engine.request import RequestId

FLOAT_BYTES = 4


class KvCache:
    """Always: both pools are [blocks, layers, block size, 2, KV heads, head dim] and contiguous, so that a block is one
    piece of memory and its copy is bit-equal; every number in the device pool is finite.

    Memory is zero pages of the system until a block is first written.
    """

    def __init__(self, config: ModelConfig, *, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        shape = pool_shape(config, block_size).of_block
        self.device_pool = _lazy_zeros(num_blocks, *shape)
        self._host_pool = _lazy_zeros(num_host_blocks, *shape)

    def swap_out(self, copies: Iterable[BlockCopy]) -> None:
        """Device to host, whole blocks."""
        for copy in copies:
            self._host_pool[copy.host_block].copy_(self.device_pool[copy.device_block])

    def swap_in(self, copies: Iterable[BlockCopy]) -> None:
        """Host to device, whole blocks."""
        for copy in copies:
            self.device_pool[copy.device_block].copy_(self._host_pool[copy.host_block])

    def measure_copy(self, num_blocks: int) -> None:
        """Bring as many blocks in as a calibration wants to time; only while nothing lives in the pools."""
        self.swap_in([BlockCopy(RequestId("calibration"), block, block) for block in range(num_blocks)])

    def scrub(self, device_blocks: Iterable[int]) -> None:
        """Forget numbers that are not finite: a masked slot still takes part in attention, times zero."""
        for block in device_blocks:
            self.device_pool[block].zero_()


def bytes_per_block(config: ModelConfig, block_size: int) -> int:
    """Of keys and values in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim * FLOAT_BYTES


def _lazy_zeros(*shape: int) -> Tensor:
    """numpy's zeros ask the system for zero pages; torch's would touch every page at once."""
    return torch.from_numpy(numpy.zeros(shape, dtype=numpy.float32))
