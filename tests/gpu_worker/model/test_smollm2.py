"""The demo's model, SmolLM2-135M-Instruct: its own words, and its logits beside transformers'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.models.gguf_weights import INSIDE_LAYER, OUTSIDE_LAYERS
from gpu_worker.models.weights import open_weights
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.request import RequestId
from wire import vocabulary
from wire.encoding import TextEncoder

FRANCE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def executor(demo_model_path: Path) -> ModelExecutor:
    executor = build(demo_model_path, kv_mib=64, host_kv_mib=16, threads=0)
    executor.with_margins = True
    return executor


@pytest.fixture(scope="module")
def prompt(demo_model_path: Path) -> list[int]:
    return TextEncoder.of_model(demo_model_path).encode([(True, FRANCE)])


def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' forward over the dequantised weights."""
    weights = open_weights(path)
    shape = weights.config
    settings = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.rms_norm_epsilon,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(settings)
    names = [name for name in OUTSIDE_LAYERS if name != "lm_head.weight"]
    names += [name for name, _ in model.named_parameters() if any(part in name for part in INSIDE_LAYER)]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    state = {name: weights.tensor(name, *shapes[name]) for name in names}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([token_ids])).logits[0, -1]
    return logits


def test_it_knows_the_capital_of_france(
    executor: ModelExecutor, prompt: list[int], demo_model_path: Path, drive: Any
) -> None:
    words = vocabulary.load(demo_model_path)
    driver = drive(executor)
    chat = driver.add("chat", prompt)
    while not (chat.output and chat.output[-1] in words.stop_token_ids):
        driver.step([chat], chunk=16)
    assert words.decode(chat.output) == b"The capital of France is Paris."


def test_its_logits_are_those_of_transformers(
    executor: ModelExecutor, prompt: list[int], demo_model_path: Path
) -> None:
    row = ScheduledRow(RequestId("a"), prompt, 0, [9, 4, 7], True, [], None)
    (logits,) = executor._runner.run([row]).logits
    expected = reference_logits(demo_model_path, prompt)
    assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_in_a_batch_and_through_the_host_it_gives_the_text_it_gives_alone(
    executor: ModelExecutor, prompt: list[int], drive: Any
) -> None:
    alone = drive(executor).add("alone", prompt)
    drive(executor).run(alone, 12)
    driver = drive(executor, seed=1)
    batched = driver.add("batched", prompt)
    others = [driver.add(f"bulk {i}", prompt[i : i + 9]) for i in range(3)]
    while len(batched.output) < 12:
        driver.step([batched, *others], chunk=20)
        driver.through_the_host(batched)
    apart = next((i for i, pair in enumerate(zip(alone.output, batched.output, strict=True)) if len({*pair}) > 1), 12)
    assert apart == 12 or alone.margins[apart] < 1e-3  # two logits as near as this may change places (contracts §5)


FULL_POOL = """
import sys
from gpu_worker.device.building import build
from scheduler_engine.plan import ScheduledRow, StepPlan
executor = build(sys.argv[1], kv_mib=512, host_kv_mib=64, threads=1)
executor.cache.device_pool.fill_(0.5)
rows = [ScheduledRow("chunk", [5] * 256, 0, range(16), True, [], None)]
rows += [ScheduledRow(str(i), [5], 300, range(16 + 19 * i, 35 + 19 * i), True, [], None) for i in range(32)]
assert not executor.execute(StepPlan(1, tuple(rows), (), (), 288, None)).failed
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build's own libraries take some 300 MiB more")
def test_with_a_full_pool_of_512_mib_a_worker_stays_below_1600_mib(demo_model_path: Path) -> None:
    command = [sys.executable, "-c", FULL_POOL, str(demo_model_path)]
    most_kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert most_kib < 1_600 << 10
