"""The Llama family's forward, on the kernels of a device: Llama 2/3, SmolLM2, Mistral, Qwen 2 (bias), Qwen 3 (QK norm).

Knows weights and batches of tokens; refuses to know requests, sampling and how a pool is shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.models.batch import Batch
from gpu_worker.models.config import DividedRope, LinearRope, Llama3Rope, ModelConfig, PlainRope
from gpu_worker.models.target import Linear, Target, target_for
from gpu_worker.models.weights import EMBEDDING, HEAD, Embedding, Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. ``query_key_value`` and ``gate_up`` are fused: one product each."""

    attention_norm: Tensor
    query_key_value: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Always: a row's result depends on that row's tokens and context alone, up to rounding."""

    def __init__(self, weights: Weights, target: Target | None = None) -> None:
        """``target``: a CPU in float32 unless given."""
        self.config = config = weights.config
        self.target = target = target or target_for(config)
        self._embedding = _load_embedding(weights, target)
        self._layers = [_load_layer(weights, index, target) for index in range(config.num_layers)]
        self._norm = target.put(weights.tensor("model.norm.weight", config.hidden_size))
        head = EMBEDDING if config.tied_embeddings else HEAD
        self._head = target.make_linear(target.put(weights.tensor(head, config.vocab_size, config.hidden_size)), None)
        self._frequencies = inverse_frequencies(config).to(target.device)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Normed hidden states [T, hidden]. Writes the tokens' keys and values into ``pool``."""
        kernels, epsilon = self.target.kernels, self.config.rms_norm_epsilon
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
        config, kernels, norms = self.config, self.target.kernels, None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm, config.rms_norm_epsilon)
        fused = layer.query_key_value(normed).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries = kernels.rotate_and_write(fused, turns, pool, index, batch.place, norms)
        return kernels.attend(queries, pool, index, batch.place)


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


def _load_embedding(weights: Weights, target: Target) -> Embedding:
    """On a CPU the table stays as the file stores it, which is smaller."""
    shape = (weights.config.vocab_size, weights.config.hidden_size)
    if target.device.type == "cpu":
        return weights.embedding(*shape)
    table = target.put(weights.tensor(EMBEDDING, *shape))
    return lambda token_ids: functional.embedding(token_ids, table)


def _load_layer(weights: Weights, index: int, target: Target) -> Layer:
    config, prefix = weights.config, f"model.layers.{index}"
    hidden, wide = config.hidden_size, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    sizes = {letter: num_heads * config.head_dim for letter, num_heads in heads.items()}
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def vector(name: str, size: int) -> Tensor:
        return target.put(weights.tensor(name, size))

    def linear(*parts: Tensor, bias: Tensor | None = None) -> Linear:
        return target.make_linear(target.put(torch.cat(parts) if len(parts) > 1 else parts[0]), bias)

    bias = None
    if config.qkv_bias:
        bias = torch.cat([vector(f"{attention}.{x}_proj.bias", size) for x, size in sizes.items()])
    return Layer(
        attention_norm=vector(f"{prefix}.input_layernorm.weight", hidden),
        query_key_value=linear(
            *(weights.tensor(f"{attention}.{x}_proj.weight", size, hidden) for x, size in sizes.items()), bias=bias
        ),
        query_norm=vector(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=vector(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=linear(weights.tensor(f"{attention}.o_proj.weight", hidden, sizes["q"])),
        mlp_norm=vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=linear(*(weights.tensor(f"{mlp}.{part}_proj.weight", wide, hidden) for part in ("gate", "up"))),
        down=linear(weights.tensor(f"{mlp}.down_proj.weight", hidden, wide)),
    )
