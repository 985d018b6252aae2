"""Logits beside transformers': the largest difference stays below 2e-4 of the largest logit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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

from gpu_worker.kv_cache import KvCache
from gpu_worker.model_runner import ModelRunner
from gpu_worker.models import linear
from gpu_worker.models.llama import Llama
from gpu_worker.weights import open_weights
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.request import RequestId

TOLERANCE = 2e-4
PROMPT = [(5 * index + 2) % 259 for index in range(75)]


def last_logits(path: Path, prompt: list[int], chunks: tuple[int, ...] = ()) -> Tensor:
    """Of the prompt's last token, computed in one or several steps through a scrambled block table."""
    model = Llama(open_weights(path))
    runner = ModelRunner(model, KvCache(model.config, num_blocks=16, num_host_blocks=0, block_size=16))
    table, start = [11, 3, 14, 0, 7, 9, 2], 0
    for end in (*chunks, len(prompt)):
        row = ScheduledRow(RequestId("a"), prompt[start:end], start, table, True, (), None)
        computed = runner.run([row])
        start = end
    return computed.logits[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("chunks", [(), (1,), (16, 32), (50, 51, 52)])
def test_the_tiny_model_computes_what_transformers_computes(
    tiny_folder: Path, tiny_logits: Callable[[list[int]], Tensor], chunks: tuple[int, ...]
) -> None:
    assert_close(last_logits(tiny_folder, PROMPT, chunks), tiny_logits(PROMPT)[-1])


def test_without_packed_weights_it_computes_the_same(
    tiny_folder: Path, tiny_logits: Callable[[list[int]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda: False)
    assert_close(last_logits(tiny_folder, PROMPT, (70,)), tiny_logits(PROMPT)[-1])


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
FAMILY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "an untied Llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "Llama 3 frequencies": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear frequencies": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "Mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "Qwen 2, with QKV bias": (Qwen2ForCausalLM, Qwen2Config, {}),
    "Qwen 3, with QK norm and its own head size": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


@pytest.mark.parametrize("name", FAMILY)
def test_every_model_of_the_family_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model_class, config_class, extra = FAMILY[name]
    torch.manual_seed(1)
    reference = model_class(config_class(**{**SHAPE, **extra})).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:  # else zeros and ones: a mistake would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1]
    assert_close(last_logits(tmp_path, PROMPT, (20,)), expected)


def test_sharded_half_precision_weights_are_read_as_their_values(
    tiny_folder: Path, tiny_tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    halves = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tiny_tensors.items()}
    names = sorted(halves)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: halves[name] for name in members}, tmp_path / shard)
    index = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(str({"weight_map": index}).replace("'", '"'))
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    weights = open_weights(tmp_path)
    found = weights.tensor("model.layers.1.mlp.up_proj.weight", 128, 64)
    assert found.dtype == torch.float32
    assert torch.equal(found, halves["model.layers.1.mlp.up_proj.weight"].float())
