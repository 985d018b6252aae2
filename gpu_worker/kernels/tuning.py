"""Tile sizes, warps and stages of the Triton kernels, in one place. Knows numbers; refuses to know what they are for.

The attention kernels try their few candidates once per key, at their first call, which must come before a graph is
captured. Triton's interpreter has no clock to try by: there the first candidate counts.
"""

from __future__ import annotations

import os

import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

SMALLEST_DOT = 16  # tl.dot takes no side below it; fewer rows are padded
DECODE_SPLITS_LIMIT = 64  # partial results per row and head that one program adds up
DECODE_PROGRAMS_PER_PROCESSOR = 4  # enough loads in flight to hide a load's latency
PREFILL_TILE = 128  # queries times heads of a group that one program holds
ROTATE_HEADS = 64  # heads that one program turns at once
COPY_TILE = 4_096  # elements of a block that one program copies
SWIGLU_TILE = 1_024


def decode_configs() -> list[triton.Config]:
    """TILE: tokens of context per turn of the loop."""
    sizes = [(64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3), (32, 4, 4)]
    return _first_if_interpreted([triton.Config({"TILE": t}, num_warps=w, num_stages=s) for t, w, s in sizes])


def prefill_configs() -> list[triton.Config]:
    """TILE: tokens of context per turn of the loop."""
    sizes = [(64, 8, 2), (64, 4, 3), (128, 8, 2), (64, 8, 3)]
    return _first_if_interpreted([triton.Config({"TILE": t}, num_warps=w, num_stages=s) for t, w, s in sizes])


def _first_if_interpreted(candidates: list[triton.Config]) -> list[triton.Config]:
    return candidates[:1] if INTERPRETED else candidates


def row_warps(num_elements: int) -> int:
    """Warps for a program that holds a whole row: about 8 elements of 2 bytes per thread and load."""
    return min(16, max(1, num_elements // 512))


def num_splits(num_rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Into how many parts a decode step cuts each context: a power of two that fills the device, whatever the lengths.

    It depends on the batch alone, so that a captured graph fits every context.
    """
    wanted = DECODE_PROGRAMS_PER_PROCESSOR * num_processors / max(1, num_rows * num_kv_heads)
    splits = 1
    while splits < wanted and splits < DECODE_SPLITS_LIMIT:
        splits *= 2
    return splits
