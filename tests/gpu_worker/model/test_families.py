"""Every family beside transformers: a tiny random model, from its folder, from shards and from a GGUF file.

The largest difference of all logits stays below 2e-4 of the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.model_runner import ModelRunner
from gpu_worker.models.config import FAMILIES
from gpu_worker.models.llama import Llama
from gpu_worker.models.weights import WeightsError, open_weights
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.request import RequestId

TOLERANCE = 2e-4
PROMPT = [(5 * index + 2) % 259 for index in range(75)]
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


@dataclass(frozen=True)
class Kind:
    model: Any
    config: Any
    architecture: gguf.MODEL_ARCH
    extra: dict[str, Any] = field(default_factory=dict)


LLAMA, QWEN2, QWEN3 = gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3
KINDS = {
    "Llama, untied": Kind(LlamaForCausalLM, LlamaConfig, LLAMA, {"tie_word_embeddings": False}),
    "SmolLM2, tied": Kind(LlamaForCausalLM, LlamaConfig, LLAMA, {"tie_word_embeddings": True}),
    "Llama 2, all heads": Kind(LlamaForCausalLM, LlamaConfig, LLAMA, {"num_key_value_heads": 4}),
    "Llama 3 frequencies": Kind(LlamaForCausalLM, LlamaConfig, LLAMA, {"rope_parameters": LLAMA3}),
    "linear frequencies": Kind(LlamaForCausalLM, LlamaConfig, LLAMA, {"rope_parameters": LINEAR}),
    "Mistral": Kind(MistralForCausalLM, MistralConfig, LLAMA, {"sliding_window": None}),
    "Mistral with a window": Kind(MistralForCausalLM, MistralConfig, LLAMA, {"sliding_window": 80, "head_dim": 24}),
    "Qwen 2, untied": Kind(Qwen2ForCausalLM, Qwen2Config, QWEN2, {"tie_word_embeddings": False}),
    "Qwen 2.5, tied": Kind(Qwen2ForCausalLM, Qwen2Config, QWEN2, {"tie_word_embeddings": True}),
    "Qwen 3": Kind(Qwen3ForCausalLM, Qwen3Config, QWEN3, {"head_dim": 32, "tie_word_embeddings": True}),
}


def logits_of(path: Path) -> Tensor:
    """Of every token of the prompt, in chunks through a scrambled block table."""
    model = Llama(open_weights(path))
    cache = KvCache(model.config, num_blocks=16, num_host_blocks=0, block_size=16)
    runner = ModelRunner(model, cache)
    table, found = [11, 3, 14, 0, 7, 9, 2], []
    for end in range(1, len(PROMPT) + 1):  # one by one: each position's logits are those of a last token
        row = ScheduledRow(RequestId("a"), PROMPT[end - 1 : end], end - 1, table, True, (), None)
        found.append(runner.run([row]).logits[0])
    whole = runner.run([ScheduledRow(RequestId("a"), PROMPT, 0, table, True, (), None)]).logits[0]
    assert_close(whole, found[-1])
    return torch.stack(found)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def reference(kind: Kind) -> Any:
    torch.manual_seed(1)
    model = kind.model(kind.config(**{**SHAPE, **kind.extra})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:  # else zeros and ones: a mistake would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def expected(reference: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([PROMPT])).logits[0]
    return logits


def test_a_model_from_its_folder_whole_or_in_shards_computes_what_transformers_computes(
    reference: Any, expected: Tensor, tmp_path: Path
) -> None:
    reference.save_pretrained(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert_close(logits_of(tmp_path / "whole"), expected)
    assert_close(logits_of(tmp_path / "shards"), expected)


def test_a_model_from_a_gguf_file_computes_what_transformers_computes(
    kind: Kind, reference: Any, expected: Tensor, tmp_path: Path
) -> None:
    assert_close(logits_of(write_gguf(tmp_path / "model.gguf", kind.architecture, reference)), expected)


def write_gguf(path: Path, architecture: gguf.MODEL_ARCH, model: Any) -> Path:
    """As llama.cpp's converter writes it: the gguf package's own names, rows of Q and K interleaved for llama."""
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if getattr(config, "sliding_window", None) and architecture is LLAMA:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if config.rope_parameters["rope_type"] == "llama3":
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture is LLAMA and ".q_proj." in name:
            values = interleaved(values, config.num_attention_heads)
        if architecture is LLAMA and ".k_proj." in name:
            values = interleaved(values, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(rows: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """llama.cpp's ``permute`` (convert_hf_to_gguf.py)."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def test_every_family_in_the_table_is_tested() -> None:
    assert {kind.config.model_type for kind in KINDS.values()} == set(FAMILIES)


def test_beyond_a_sliding_window_nothing_is_computed(tmp_path: Path) -> None:
    kind = KINDS["Mistral with a window"]
    model = kind.model(kind.config(**{**SHAPE, **kind.extra}))
    model.save_pretrained(tmp_path)
    assert open_weights(tmp_path).config.context_length == 80
    assert open_weights(write_gguf(tmp_path / "m.gguf", LLAMA, model)).config.context_length == 80


@pytest.mark.parametrize(
    ("config", "settings", "stranger"),
    [
        (LlamaConfig, {}, "self_attn.q_proj.bias"),
        (Qwen2Config, {}, "self_attn.k_norm.weight"),
        (Qwen3Config, {}, "mlp.gate_proj.bias"),
    ],
)
def test_a_tensor_that_the_forward_would_not_use_is_refused_by_name(
    config: Any, settings: dict[str, Any], stranger: str, tmp_path: Path, save_folder: Callable[..., Path]
) -> None:
    given = config(**SHAPE, **settings).to_dict()
    folder = save_folder(tmp_path, given, {f"model.layers.0.{stranger}": torch.ones(64)})
    with pytest.raises(WeightsError, match=f"tensor model.layers.0.{stranger} is not part"):
        open_weights(folder)


def test_frequencies_that_the_first_llamas_stored_are_left_aside(
    tmp_path: Path, save_folder: Callable[..., Path], tiny_settings: dict[str, Any], tiny_tensors: dict[str, Tensor]
) -> None:
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    folder = save_folder(tmp_path, tiny_settings, tiny_tensors | stored)
    assert Llama(open_weights(folder)).config.num_layers == 2
