"""Where the rows of one step lie in the pool, on the host, before a device's kernels make tensors of it.

A pool is [num_blocks, L, S, 2, K, D], contiguous: one block, all its layers, is one piece of memory, and a token's keys
and values of a layer lie side by side. Letters as in ``reference``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

BLOCK_SIZE = 16  # S of every pool this worker makes


@dataclass(frozen=True, slots=True)
class PoolShape:
    """L, S, H, K, D of a model and its pool."""

    num_layers: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def of_block(self) -> tuple[int, ...]:
        """Of one block in a pool."""
        return (self.num_layers, self.block_size, 2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Layout:
    """Always: rows with one new token come first, and a row's unused table entries repeat a block of its own.

    ``tables`` [R, blocks] int32, ``contexts`` [R] int32: the row's tokens when the step is done; ``lengths`` [R] int32:
    how many of them are new.
    """

    tables: NDArray[numpy.int32]
    contexts: NDArray[numpy.int32]
    lengths: NDArray[numpy.int32]
    block_size: int

    @property
    def num_single(self) -> int:
        """Rows with one new token."""
        return int((self.lengths == 1).sum())

    @property
    def firsts(self) -> NDArray[numpy.int32]:
        """[R + 1]: row r's new tokens are ``[firsts[r], firsts[r + 1])`` of the step's tokens."""
        return numpy.concatenate(([0], numpy.cumsum(self.lengths))).astype(numpy.int32)

    def positions(self) -> NDArray[numpy.int64]:
        """[T]: of every new token in its row."""
        firsts = self.firsts
        starts = self.contexts - self.lengths - firsts[:-1]
        return numpy.arange(firsts[-1]) + numpy.repeat(starts, self.lengths)

    def places(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Block and slot [T] of every new token."""
        positions = self.positions()
        rows = numpy.repeat(numpy.arange(len(self.lengths)), self.lengths)
        blocks = self.tables[rows, positions // self.block_size].astype(numpy.int64)
        return blocks, positions % self.block_size
