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

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.settings import FieldError, parse_config
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
        try:
            config = parse_config(settings)
        except FieldError as error:
            raise WeightsError(f"{where}: {error}") from error
        self.config = checked(config, where)
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


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """The same config, or WeightsError when it breaks its own promise."""
    wrong = config.wrong_field()
    if wrong:
        raise WeightsError(f"{where}: {wrong}")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path.parent.name}/{path.name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path.parent.name}/{path.name}: is not JSON") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path.parent.name}/{path.name}: is not a JSON object")
    return content
