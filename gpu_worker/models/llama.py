"""The Llama family's forward, on the kernels of a device: Llama 2/3, SmolLM2, Mistral, Qwen 2 (bias), Qwen 3 (QK norm).

Knows weights and batches of tokens; refuses to know requests, sampling and how a pool is shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from gpu_worker.kernels.choice import Kernels, kernels_for
from gpu_worker.kernels.layout import BLOCK_SIZE
from gpu_worker.models.batch import Batch, pool_shape
from gpu_worker.models.config import DividedRope, LinearRope, Llama3Rope, ModelConfig, PlainRope
from gpu_worker.models.linear import PackedLinear
from gpu_worker.weights import EMBEDDING, Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. ``query_key_value`` and ``gate_up`` are fused: one product each."""

    attention_norm: Tensor
    query_key_value: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Llama:
    """Always: a row's result depends on that row's tokens and context alone, up to rounding."""

    def __init__(self, weights: Weights, kernels: Kernels | None = None) -> None:
        """``kernels``: those of a CPU unless given."""
        self.config = config = weights.config
        self.kernels = kernels or kernels_for(torch.device("cpu"), pool_shape(config, BLOCK_SIZE))
        self._embedding = weights.embedding(config.vocab_size, config.hidden_size)
        self._layers = [_load_layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.tensor("model.norm.weight", config.hidden_size)
        head = EMBEDDING if config.tied_embeddings else "lm_head.weight"
        self._head = PackedLinear(weights.tensor(head, config.vocab_size, config.hidden_size))
        self._frequencies = inverse_frequencies(config)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Normed hidden states [T, hidden]. Writes the tokens' keys and values into ``pool``."""
        kernels, epsilon = self.kernels, self.config.rms_norm_epsilon
        angles = batch.positions[:, None].to(torch.float32) * self._frequencies
        turns = torch.stack((angles.cos(), angles.sin()), dim=1)  # [T, 2, D / 2]
        hidden = self._embedding(batch.token_ids)
        normed = kernels.norm(hidden, self._layers[0].attention_norm, epsilon)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            mixed = layer.output(self._attention(index, layer, normed, batch, pool, turns))
            normed = kernels.add_and_norm(hidden, mixed, layer.mlp_norm, epsilon)
            widened = layer.down(kernels.swiglu(layer.gate_up(normed)))
            normed = kernels.add_and_norm(hidden, widened, next_norm, epsilon)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """[R, hidden], as ``forward`` gives them → [R, vocabulary]."""
        return self._head(normed)

    def _attention(self, index: int, layer: Layer, normed: Tensor, batch: Batch, pool: Tensor, turns: Tensor) -> Tensor:
        config, norms = self.config, None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm, config.rms_norm_epsilon)
        fused = layer.query_key_value(normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries = self.kernels.rotate_and_write(fused, turns, pool, index, batch.place, norms)
        return self.kernels.attend(queries, pool, index, batch.place)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position, [D / 2]; scalings as in the papers and in transformers' ``modeling_rope_utils``."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match config.rope:
        case PlainRope():
            return plain
        case LinearRope(factor):
            return plain / factor
        case DividedRope(factors):
            return plain / torch.tensor(factors)
        case Llama3Rope() as rope:
            return _llama3_frequencies(plain, rope)
        case other:
            assert_never(other)


def _llama3_frequencies(plain: Tensor, rope: Llama3Rope) -> Tensor:
    wavelengths = 2 * math.pi / plain
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    share = (rope.original_context / wavelengths - low) / (high - low)  # 0: long waves, divided; 1: short waves, kept
    smooth = share.clamp(0.0, 1.0)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _load_layer(weights: Weights, index: int) -> Layer:
    config, prefix = weights.config, f"model.layers.{index}"
    hidden, wide = config.hidden_size, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    sizes = {letter: num_heads * config.head_dim for letter, num_heads in heads.items()}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    fused = torch.cat([weights.tensor(f"{attention}.{x}_proj.weight", size, hidden) for x, size in sizes.items()])
    bias = None
    if config.qkv_bias:
        bias = torch.cat([weights.tensor(f"{attention}.{x}_proj.bias", size) for x, size in sizes.items()])
    gate_up = torch.cat([weights.tensor(f"{mlp}.{part}_proj.weight", wide, hidden) for part in ("gate", "up")])
    return Layer(
        attention_norm=weights.tensor(f"{prefix}.input_layernorm.weight", hidden),
        query_key_value=PackedLinear(fused, bias),
        query_norm=weights.tensor(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=weights.tensor(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=PackedLinear(weights.tensor(f"{attention}.o_proj.weight", hidden, sizes["q"])),
        mlp_norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=PackedLinear(gate_up),
        down=PackedLinear(weights.tensor(f"{mlp}.down_proj.weight", hidden, wide)),
    )
