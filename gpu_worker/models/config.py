"""The shape of a model of the Llama family, as numbers. Knows no tensors and no files.

To add a model that differs only in what ``Family`` can say, add its row to FAMILIES.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model has beside what all have: RMSNorm, rotary positions, grouped heads, SwiGLU."""

    gguf_architecture: str  # general.architecture of its GGUF files
    interleaved_in_gguf: bool = False  # llama.cpp keeps rows of Q and K in pairs
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of Q and K, before the rotation


FAMILIES = {  # by model_type of config.json
    "llama": Family(gguf_architecture="llama", interleaved_in_gguf=True),  # Llama 2 and 3, SmolLM 2
    "mistral": Family(gguf_architecture="llama", interleaved_in_gguf=True),
    "qwen2": Family(gguf_architecture="qwen2", qkv_bias=True),
    "qwen3": Family(gguf_architecture="qwen3", qk_norm=True),
}
FAMILY_OF_GGUF = {family.gguf_architecture: family for family in FAMILIES.values()}


@dataclass(frozen=True, slots=True)
class PlainRope:
    """Frequencies as the theta gives them."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies divided by a factor, high ones kept, a smooth passage between (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class DividedRope:
    """Each frequency divided by its own factor: how a GGUF file writes down a scaling."""

    factors: tuple[float, ...]


Rope = PlainRope | LinearRope | Llama3Rope | DividedRope


_LARGEST = {  # far above any model: what is beyond is a damaged file, and would be waited for in vain
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_layers": 1 << 12,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "context_length": 1 << 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Always: ``num_heads`` is a multiple of ``num_kv_heads``, ``head_dim`` is even, everything is positive."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_epsilon: float
    rope_theta: float
    context_length: int
    tied_embeddings: bool
    rope: Rope = PlainRope()
    qkv_bias: bool = False
    qk_norm: bool = False

    def wrong_field(self) -> str | None:
        """A sentence that names what breaks the promise above, or None."""
        for name, most in _LARGEST.items():
            if not 0 < getattr(self, name) <= most:
                return f"{name} must be from 1 to {most:,}, not {getattr(self, name)}"
        if self.num_heads % self.num_kv_heads:
            return f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
        if self.head_dim % 2:
            return f"head_dim must be even, not {self.head_dim}"
        for name in ("rms_norm_epsilon", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                return f"{name} must be a positive number, not {getattr(self, name)}"
        return self._wrong_rope()

    def _wrong_rope(self) -> str | None:
        numbers = self.rope.factors if isinstance(self.rope, DividedRope) else astuple(self.rope)
        if not all(0 < number < math.inf for number in numbers):
            return f"the factors of the rotary scaling must be positive numbers, not {numbers[:4]}"
        if isinstance(self.rope, DividedRope) and len(numbers) != self.head_dim // 2:
            return f"the rotary scaling has {len(numbers)} factors, and head_dim {self.head_dim} needs half as many"
        if isinstance(self.rope, Llama3Rope) and self.rope.low_frequency_factor >= self.rope.high_frequency_factor:
            return f"low_freq_factor {self.rope.low_frequency_factor} must be below high_freq_factor"
        return None
