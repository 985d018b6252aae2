"""Random numbers without state: a function of (stream, position, token id). Knows bits; refuses to know requests."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TABLE_SIZE, PIECE = 1 << 22, 1 << 18
LONG_WORD = 0xFFFF_FFFF_FFFF_FFFF


class GumbelNoise:
    """Always: a window is the same on every machine, for the same stream and position."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._table = noise_table(max(TABLE_SIZE, 64 * vocab_size)).to(device)

    def window(self, stream: int, position: int) -> Tensor:
        """[vocabulary] of independent Gumbel variables; a view, not to be written."""
        start = _splitmix(stream, position) % (self._table.numel() - self._vocab_size)
        return self._table[start : start + self._vocab_size]


@functools.cache
def noise_table(size: int) -> Tensor:
    """Independent Gumbel variables, the same on every machine; hashing each token anew cost 20 times a window's price.

    Two windows that overlap give one token the noise of *another*, so draws stay independent to the eye of any text.
    """
    pieces = (range(first, min(first + PIECE, size)) for first in range(0, size, PIECE))
    return torch.cat([_gumbel(torch.arange(piece.start, piece.stop, dtype=torch.int32)) for piece in pieces])


def _gumbel(counters: Tensor) -> Tensor:
    bits = _mix(_mix(counters) + 1)
    # 24 bits, at the middle of each step: small exponentials, which decide, are the finest; 1.0 must not appear
    uniform = _shift(bits, 8).to(torch.float32).add_(0.5).mul_(2.0**-24).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _splitmix(stream: int, position: int) -> int:
    """64 bits out of a stream and a position: splitmix64 (Steele, Lea, Flood 2014)."""
    mixed = (stream + (position + 1) * 0x9E37_79B9_7F4A_7C15) & LONG_WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & LONG_WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & LONG_WORD
    return mixed ^ (mixed >> 31)


def _mix(words: Tensor) -> Tensor:
    """lowbias32, a bijection of 32-bit words with little bias (Wellons, nullprogram.com/blog/2018/07/31)."""
    words = words ^ _shift(words, 16)
    words *= 0x7FEB_352D
    words ^= _shift(words, 15)
    words *= 0x846C_A68B - (1 << 32)  # as a signed word
    words ^= _shift(words, 16)
    return words


def _shift(words: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)
