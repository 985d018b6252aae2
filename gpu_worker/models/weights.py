"""Weights by their Hugging Face names, as float32, one tensor at a time; from a folder of safetensors or a GGUF file.

Knows files and their fields; refuses to know how a forward is computed, and never unpickles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.models.config import FAMILIES, LinearRope, Llama3Rope, ModelConfig, PlainRope, Rope
from wire.gguf_header import ModelFileError

EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PLAIN_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # float8 would need its scales
COMPUTED_ANEW = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # in files of the first Llamas

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
        from gpu_worker.models.gguf_weights import GgufWeights  # needs the gguf package; a folder does not

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
        where = f"{folder.name}/config.json"
        settings.setdefault("tie_word_embeddings", HEAD not in self._shard_of)
        self.config = checked(parse_config(settings, where=where), where)
        refuse_strangers(folder.name, self.config, self._shard_of)

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
        if found.dtype not in PLAIN_TYPES:
            raise WeightsError(
                f"{self._folder.name}/{shard}: tensor {name} holds {found.dtype}, which is not supported"
            )
        return found.clone()  # the file is unmapped when this returns

    def _shards_of(self, index: Path) -> Mapping[str, str]:
        where, shard_of = f"{self._folder.name}/{index.name}", _read_json(index).get("weight_map")
        if not isinstance(shard_of, dict):
            raise WeightsError(f"{where}: field weight_map is missing")
        for shard in dict.fromkeys(map(str, shard_of.values())):
            if Path(shard).name != shard or Path(shard).suffix != ".safetensors":
                raise WeightsError(f"{where}: field weight_map names {shard!r}, which is no safetensors file beside it")
            if not (self._folder / shard).is_file():
                raise WeightsError(f"{where}: field weight_map names {shard}, which is missing")
        return shard_of

    def _find_shards(self) -> Mapping[str, str]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            return self._shards_of(index)
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


def refuse_strangers(where: str, config: ModelConfig, names: Iterable[str]) -> None:
    """Raises WeightsError for a tensor that the forward would not use: such a model is not what its fields say."""
    known = {EMBEDDING, LAST_NORM, HEAD}
    for index in range(config.num_layers):
        known.update(f"model.layers.{index}.{name}" for name in names_in_layer(config))
    for name in names:
        if name not in known and not COMPUTED_ANEW.fullmatch(name):
            raise WeightsError(f"{where}: tensor {name} is not part of a model with these settings")


def names_in_layer(config: ModelConfig) -> list[str]:
    """Of one layer's tensors, after ``model.layers.N.``."""
    attention = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"self_attn.{x}_norm" for x in "qk" if config.qk_norm]
    norms_and_mlp = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    names = [f"{part}.weight" for part in (*attention, *norms_and_mlp)]
    return names + [f"self_attn.{part}_proj.bias" for part in "qkv" if config.qkv_bias]


def parse_config(settings: Mapping[str, Any], *, where: str) -> ModelConfig:
    """Of a config.json. Refuses what the forward does not compute rather than computing it wrong."""
    kind = settings.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise WeightsError(f"{where}: field model_type is {kind!r}; known are {', '.join(FAMILIES)}")
    _refuse_unknown(settings, where)
    try:
        heads, hidden = int(settings["num_attention_heads"]), int(settings["hidden_size"])
        context = int(settings["max_position_embeddings"])
        # Qwen's files name a window and say that it is not used; Mistral's use it.
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
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
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
    for field in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", "rope_interleaved"):
        if settings.get(field):
            raise WeightsError(f"{where}: field {field} is set, which is not supported")
    for field, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        found = settings.get(field, _rope_settings(settings).get(field, only))
        if found != only:
            raise WeightsError(f"{where}: field {field} is {found!r}; only {only} is supported")
    others = sorted({str(kind) for kind in settings.get("layer_types") or ()} - {"full_attention"})
    if others and settings.get("model_type") != "mistral":
        raise WeightsError(f"{where}: field layer_types names {others[0]!r}; only full_attention is supported")


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
