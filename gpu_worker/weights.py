"""Weights by their Hugging Face names, as float32, one tensor at a time; from a folder of safetensors or a GGUF file.

Knows files and their fields; refuses to know how a forward is computed, and never unpickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.models.config import LinearRope, Llama3Rope, ModelConfig, PlainRope, Rope
from wire.gguf_header import ModelFileError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
EMBEDDING = "model.embed_tokens.weight"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


Embedding = Callable[[Tensor], Tensor]


class WeightsError(ModelFileError):
    """Weights that are not what they claim. The message is one sentence that names the field."""


class Weights(Protocol):
    """Always: ``tensor`` gives float32 of exactly the asked shape, rows in the Hugging Face order, or raises."""

    config: ModelConfig

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Raises WeightsError when it is missing, of another shape or not readable. The caller owns the result."""
        ...

    def embedding(self, *shape: int) -> Embedding:
        """Token ids [T] to their rows [T, hidden], float32. Keeps the table as the file stores it, which is smaller."""
        ...


def open_weights(path: Path) -> Weights:
    """Raises ModelFileError with a sentence when ``path`` is no model this worker can run."""
    if path.is_dir():
        return FolderWeights(path)
    if path.suffix == ".gguf":
        from gpu_worker.gguf_weights import GgufWeights  # needs the gguf package; a folder does not

        return GgufWeights(path)
    if path.suffix in PICKLES:
        raise WeightsError(f"{path.name}: pickled weights are never read; give safetensors or GGUF")
    raise WeightsError(f"{path}: is neither a folder with config.json and safetensors nor a .gguf file")


class FolderWeights:
    """A Hugging Face folder: config.json, and model.safetensors or its shards by the index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        settings = _read_json(folder / "config.json")
        self._shard_of = self._find_shards()
        self.config = checked(parse_config(settings, where=f"{folder.name}/config.json"), f"{folder.name}/config.json")

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._stored(name, shape).to(torch.float32)

    def embedding(self, *shape: int) -> Embedding:
        table = self._stored(EMBEDDING, shape)
        return lambda token_ids: functional.embedding(token_ids, table).to(torch.float32)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """In the file's own precision."""
        shard = self._shard_of.get(name)
        if shard is None:
            raise WeightsError(f"{self._folder.name}: tensor {name} is missing")
        try:
            with safe_open(self._folder / shard, framework="pt") as file:
                found: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self._folder.name}/{shard}: tensor {name} cannot be read ({error})") from error
        if tuple(found.shape) != shape:
            raise WeightsError(f"{self._folder.name}/{shard}: tensor {name} is {tuple(found.shape)}, expected {shape}")
        if not found.is_floating_point():
            raise WeightsError(f"{self._folder.name}/{shard}: tensor {name} holds {found.dtype}, not floating point")
        return found.clone()  # the file is unmapped when this returns

    def _find_shards(self) -> Mapping[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            shard_of = _read_json(index).get("weight_map")
            if not isinstance(shard_of, dict):
                raise WeightsError(f"{self._folder.name}/{index.name}: field weight_map is missing")
            return shard_of
        whole = self._folder / "model.safetensors"
        if not whole.is_file():
            only_pickles = any(path.suffix in PICKLES for path in self._folder.iterdir())
            hint = "; pickled weights are never read" if only_pickles else ""
            raise WeightsError(f"{self._folder.name}: there is no model.safetensors{hint}")
        try:
            with safe_open(whole, framework="pt") as file:
                return dict.fromkeys(file.keys(), whole.name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self._folder.name}/{whole.name}: cannot be read ({error})") from error


def parse_config(settings: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Of a config.json. Refuses what the forward does not compute rather than computing it wrong."""
    kind = settings.get("model_type")
    if kind not in MODEL_TYPES:
        raise WeightsError(f"{where}: field model_type is {kind!r}; known are {', '.join(MODEL_TYPES)}")
    _refuse_unknown(settings, where)
    try:
        heads, hidden = int(settings["num_attention_heads"]), int(settings["hidden_size"])
        context = int(settings["max_position_embeddings"])
        window = settings.get("sliding_window") if kind == "mistral" else None
        return ModelConfig(
            vocab_size=int(settings["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(settings["intermediate_size"]),
            num_layers=int(settings["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(settings.get("num_key_value_heads") or heads),
            head_dim=int(settings.get("head_dim") or hidden // max(heads, 1)),
            rms_norm_epsilon=float(settings["rms_norm_eps"]),
            rope_theta=float(_rope_settings(settings).get("rope_theta") or settings.get("rope_theta") or 10_000.0),
            context_length=min(context, int(window)) if window else context,  # inside the window it is full attention
            tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
            rope=_rope(settings, where),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )
    except KeyError as error:
        raise WeightsError(f"{where}: field {error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{where}: a field has the wrong type ({error})") from error


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """The same config, or WeightsError when it breaks its own promise."""
    wrong = config.wrong_field()
    if wrong:
        raise WeightsError(f"{where}: {wrong}")
    return config


def _refuse_unknown(settings: Mapping[str, Any], where: str) -> None:
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if settings.get(field):
            raise WeightsError(f"{where}: field {field} is set, which is not supported")
    if settings.get("hidden_act", "silu") != "silu":
        raise WeightsError(f"{where}: field hidden_act is {settings['hidden_act']!r}; only silu is supported")


def _rope_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return settings.get("rope_parameters") or settings.get("rope_scaling") or {}


def _rope(settings: Mapping[str, Any], where: str) -> Rope:
    scaling = _rope_settings(settings)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            return PlainRope()
        case "linear":
            return LinearRope(float(scaling["factor"]))
        case "llama3":
            return Llama3Rope(
                factor=float(scaling["factor"]),
                low_frequency_factor=float(scaling["low_freq_factor"]),
                high_frequency_factor=float(scaling["high_freq_factor"]),
                original_context=int(scaling["original_max_position_embeddings"]),
            )
    raise WeightsError(f"{where}: field rope_scaling.rope_type is {kind!r}; known are default, linear, llama3")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path.parent.name}/{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise WeightsError(f"{path.parent.name}/{path.name}: is not JSON") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path.parent.name}/{path.name}: is not a JSON object")
    return content
