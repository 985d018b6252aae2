"""Logits beside transformers': the largest difference stays below 2e-4 of the largest logit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_worker.device.kv_cache import KvCache
from gpu_worker.device.model_runner import ModelRunner
from gpu_worker.models import linear
from gpu_worker.models.llama import Llama
from gpu_worker.models.weights import open_weights
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
