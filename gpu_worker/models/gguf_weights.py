"""Weights out of a GGUF file, under their Hugging Face names. Knows the file's names and quantised types."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.models.config import FAMILY_OF_GGUF, DividedRope, LinearRope, ModelConfig, PlainRope, Rope
from gpu_worker.models.weights import EMBEDDING, HEAD, LAST_NORM, Embedding, WeightsError, checked, refuse_strangers
from wire.gguf_header import GgufTensor, read_header

READABLE = tuple(GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"))
OUTSIDE_LAYERS = {EMBEDDING: "token_embd.weight", LAST_NORM: "output_norm.weight", HEAD: "output.weight"}
INSIDE_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


FREQUENCY_FACTORS = "rope_freqs.weight"


class GgufWeights:
    """Always: rows of Q and K are in the Hugging Face order, whatever order the file keeps them in."""

    def __init__(self, path: Path) -> None:
        self._header = read_header(path)
        self._architecture = self._header.text("general.architecture")
        family = FAMILY_OF_GGUF.get(self._architecture)
        if family is None:
            known = ", ".join(FAMILY_OF_GGUF)
            raise WeightsError(f"{path.name}: field general.architecture is {self._architecture!r}; known are {known}")
        self._family = family
        self.config = checked(self._config(), path.name)
        refuse_strangers(path.name, self.config, map(_name_of, self._header.tensors.keys() - {FREQUENCY_FACTORS}))

    def tensor(self, name: str, *shape: int) -> Tensor:
        values = torch.from_numpy(self._read(self._find(_file_name(name), *shape)))
        num_heads = self._interleaved_heads(name)
        return _halves_apart(values, num_heads) if num_heads else values

    def embedding(self, *shape: int) -> Embedding:
        found = self._find(_file_name(EMBEDDING), *shape)
        rows, kind = self._stored_rows(found), self._kind(found)
        return lambda token_ids: torch.from_numpy(dequantize(rows[token_ids.numpy()], kind))

    def _config(self) -> ModelConfig:
        header, prefix = self._header, self._architecture
        for field, most in ((f"{prefix}.expert_count", 0), ("split.count", 1)):
            if header.integer(field, 0) > most:
                raise WeightsError(f"{header.path.name}: field {field} is {header.integer(field)}, not supported")
        num_heads, hidden = (
            header.integer(f"{prefix}.attention.head_count"),
            header.integer(f"{prefix}.embedding_length"),
        )
        head_dim = header.integer(f"{prefix}.attention.key_length", hidden // max(num_heads, 1))
        rotated = header.integer(f"{prefix}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise WeightsError(f"{header.path.name}: field {prefix}.rope.dimension_count {rotated} is not {head_dim}")
        return ModelConfig(
            vocab_size=self._find("token_embd.weight").shape[0],
            hidden_size=hidden,
            intermediate_size=header.integer(f"{prefix}.feed_forward_length"),
            num_layers=header.integer(f"{prefix}.block_count"),
            num_heads=num_heads,
            num_kv_heads=header.integer(f"{prefix}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_epsilon=header.real(f"{prefix}.attention.layer_norm_rms_epsilon"),
            rope_theta=header.real(f"{prefix}.rope.freq_base", 10_000.0),
            context_length=self._context_length(),
            tied_embeddings="output.weight" not in header.tensors,
            rope=self._rope(),
            qkv_bias=self._family.qkv_bias,
            qk_norm=self._family.qk_norm,
        )

    def _context_length(self) -> int:
        """Inside a sliding window it is full attention; beyond it, nothing is computed."""
        context = self._header.integer(f"{self._architecture}.context_length")
        window = self._header.integer(f"{self._architecture}.attention.sliding_window", 0)
        return min(context, window) if window else context

    def _rope(self) -> Rope:
        factors = self._header.tensors.get(FREQUENCY_FACTORS)
        if factors is not None:
            if len(factors.shape) != 1:
                raise WeightsError(f"{self._where(factors)} is {factors.shape}, expected one row")
            return DividedRope(tuple(self._read(factors).tolist()))
        field = f"{self._architecture}.rope.scaling"
        match self._header.metadata.get(f"{field}.type", "none"):
            case "none":
                return PlainRope()
            case "linear":
                return LinearRope(self._header.real(f"{field}.factor"))
            case other:
                raise WeightsError(f"{self._header.path.name}: field {field}.type is {other!r}; known are none, linear")

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows llama.cpp has interleaved in this tensor; 0 where it has not."""
        if not self._family.interleaved_in_gguf:
            return 0
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0

    def _find(self, file_name: str, *shape: int) -> GgufTensor:
        """Of this shape, if one is given."""
        found = self._header.tensors.get(file_name)
        if found is None:
            raise WeightsError(f"{self._header.path.name}: tensor {file_name} is missing")
        if shape and found.shape != shape:
            raise WeightsError(f"{self._where(found)} is {found.shape}, expected {shape}")
        return found

    def _read(self, tensor: GgufTensor) -> NDArray[numpy.float32]:
        return dequantize(self._stored_rows(tensor), self._kind(tensor)).reshape(tensor.shape)

    def _stored_rows(self, tensor: GgufTensor) -> NDArray[numpy.uint8]:
        """[rows, bytes of a row], as in the file."""
        block_size, block_bytes = GGML_QUANT_SIZES[self._kind(tensor)]
        if tensor.shape[-1] % block_size:
            raise WeightsError(f"{self._where(tensor)} has rows of {tensor.shape[-1]}, no multiple of {block_size}")
        row_bytes = tensor.shape[-1] // block_size * block_bytes
        num_rows = math.prod(tensor.shape[:-1])
        if tensor.offset + num_rows * row_bytes > self._header.path.stat().st_size:
            raise WeightsError(f"{self._where(tensor)} ends after the file does; the file is truncated")
        raw = numpy.fromfile(self._header.path, numpy.uint8, num_rows * row_bytes, offset=tensor.offset)
        return raw.reshape(num_rows, row_bytes)

    def _kind(self, tensor: GgufTensor) -> GGMLQuantizationType:
        for kind in READABLE:
            if kind.value == tensor.type_id:
                return kind
        known = ", ".join(kind.name for kind in READABLE)
        raise WeightsError(f"{self._where(tensor)} has type {tensor.type_id}; known are {known}")

    def _where(self, tensor: GgufTensor) -> str:
        return f"{self._header.path.name}: tensor {tensor.name}"


def _file_name(name: str) -> str:
    """Of a Hugging Face name. Raises WeightsError for a name no GGUF of the family has."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if inside is None or inside[2] not in INSIDE_LAYER:
        raise WeightsError(f"tensor {name} has no counterpart in a GGUF file")
    return f"blk.{inside[1]}.{INSIDE_LAYER[inside[2]]}.{inside[3]}"


def _name_of(file_name: str) -> str:
    """The Hugging Face name, or the file's own where there is none."""
    for name, other in OUTSIDE_LAYERS.items():
        if other == file_name:
            return name
    inside = re.fullmatch(r"blk\.(\d+)\.(.+)\.(weight|bias)", file_name)
    for name, other in INSIDE_LAYER.items():
        if inside is not None and other == inside[2]:
            return f"model.layers.{inside[1]}.{name}.{inside[3]}"
    return file_name


def _halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's ``permute``: pairs (i, i + half) lie side by side in the file; here each half lies together."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
