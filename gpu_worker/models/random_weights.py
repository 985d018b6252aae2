"""A model of random numbers, made in memory: for self-tests and figures where there is no model file."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.weights import EMBEDDING, Embedding

# 64 greedy tokens of it keep clear of ties, so that a text may be compared token by token in float32.
TINY = ModelConfig(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_epsilon=1e-5,
    rope_theta=10_000.0,
    context_length=512,
    tied_embeddings=True,
)


class RandomWeights:
    """See ``weights.Weights``. Always: a tensor is a function of seed, name and shape; norms are 1 and biases 0."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, deviation: float = 0.2) -> None:
        self.config = config
        self._seed = seed
        self._deviation = deviation

    def tensor(self, name: str, *shape: int) -> Tensor:
        if "norm" in name:
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return torch.randn(shape, generator=generator).mul_(self._deviation)

    def embedding(self, *shape: int) -> Embedding:
        table = self.tensor(EMBEDDING, *shape)
        return lambda token_ids: functional.embedding(token_ids, table)
