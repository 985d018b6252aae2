"""The Llama family's forward in plain torch, float32: Llama 2/3, SmolLM2, Mistral, Qwen 2 (bias), Qwen 3 (QK norm).

Knows weights and batches of tokens; refuses to know requests, sampling and how a pool is shared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as functional
from torch import Tensor

from gpu_worker.kernels.reference import attend, write_kv
from gpu_worker.models.batch import Batch
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

    def __init__(self, weights: Weights) -> None:
        self.config = config = weights.config
        self._embedding = weights.embedding(config.vocab_size, config.hidden_size)
        self._layers = [_load_layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.tensor("model.norm.weight", config.hidden_size)
        head = EMBEDDING if config.tied_embeddings else "lm_head.weight"
        self._head = PackedLinear(weights.tensor(head, config.vocab_size, config.hidden_size))
        self._frequencies = inverse_frequencies(config)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Hidden states [T, hidden] before the last norm. Writes the tokens' keys and values into ``pool``."""
        angles = (batch.positions[:, None].to(torch.float32) * self._frequencies)[:, None, :]  # [T, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        hidden = self._embedding(batch.token_ids)
        for index, layer in enumerate(self._layers):
            mixed = self._attention(index, layer, self._norm_of(hidden, layer.attention_norm), batch, pool, cos, sin)
            hidden += layer.output(mixed)
            gate, up = layer.gate_up(self._norm_of(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden += layer.down(functional.silu(gate).mul_(up))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] → [R, vocabulary]."""
        return self._head(self._norm_of(hidden, self._norm))

    def _attention(
        self, index: int, layer: Layer, rows: Tensor, batch: Batch, pool: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        fused = layer.query_key_value(rows).view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        queries, keys = fused[:, : config.num_heads], fused[:, config.num_heads : num_rotated]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = self._norm_of(queries, layer.query_norm), self._norm_of(keys, layer.key_norm)
            rotated = rotate(torch.cat((queries, keys), dim=1), cos, sin)
        else:
            rotated = rotate(fused[:, :num_rotated], cos, sin)
        queries, keys = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        write_kv(pool, index, batch.slots, torch.cat((keys, fused[:, num_rotated:]), dim=1))
        mixed = [
            attend(pool, index, group.chunks, group.mask, queries[group.first : group.last], batch.scratch)
            for group in batch.groups
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _norm_of(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, weight.shape, weight, self.config.rms_norm_epsilon)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, D]: dimension i turns with i + D / 2 (the Hugging Face arrangement)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)), dim=-1
    )


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
