"""A tiny Llama in three dresses (transformers, safetensors folder, GGUF) and a driver that makes step plans by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_worker.demo_model import DEFAULT_FOLDER, fetch
from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.plan import BlockCopy, ScheduledRow, StepPlan, StepResult
from scheduler_engine.request import RequestId
from wire.messages import SamplingParameters

TINY = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_reference() -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {key: value for key, value in TINY.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **settings)).eval()


def write_folder(folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def save_folder() -> Callable[[Path, dict[str, Any], dict[str, Tensor]], Path]:
    return write_folder


@pytest.fixture(scope="session")
def tiny_tensors(tiny_reference: LlamaForCausalLM) -> dict[str, Tensor]:
    state = tiny_reference.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items() if name != "lm_head.weight"}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tensors: dict[str, Tensor]) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", TINY, tiny_tensors)


@pytest.fixture
def tiny_settings() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture
def tiny_executor(tiny_folder: Path) -> ModelExecutor:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=4, threads=0)
    executor.with_margins = True
    return executor


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    return fetch(DEFAULT_FOLDER)


@dataclass
class Sequenced:
    """A request as the engine would keep it. Always: ``num_computed`` of its tokens are in its blocks."""

    request_id: RequestId
    prompt: list[int]
    sampling: SamplingParameters
    output: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_saved: int = 0  # blocks that are on the host too
    first_host_block: int = 0  # where they lie there, side by side

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Plans by hand on one executor. Always: hands out device blocks in a scrambled order, each to one sequence."""

    def __init__(self, executor: ModelExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.free = list(range(executor.shape.num_blocks))
        random.Random(seed).shuffle(self.free)
        self._num_steps = 0

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParameters = GREEDY) -> Sequenced:
        return Sequenced(RequestId(name), list(prompt), sampling)

    def row(self, sequence: Sequenced, chunk: int) -> ScheduledRow:
        """Let the computed tokens catch up with the wanted ones, by at most ``chunk``."""
        start = sequence.num_computed
        token_ids = sequence.tokens[start : start + chunk]
        end = start + len(token_ids)
        while len(sequence.table) * self.executor.shape.block_size < end:
            sequence.table.append(self.free.pop())
        samples = end == len(sequence.tokens)
        return ScheduledRow(
            sequence.request_id, token_ids, start, sequence.table, samples, sequence.output, sequence.sampling
        )

    def step(
        self,
        sequences: Sequence[Sequenced],
        chunk: int = 512,
        swap_out: Sequence[BlockCopy] = (),
        swap_in: Sequence[BlockCopy] = (),
    ) -> StepResult:
        rows = tuple(self.row(sequence, chunk) for sequence in sequences)
        self._num_steps += 1
        plan = StepPlan(self._num_steps, rows, tuple(swap_out), tuple(swap_in), token_budget=0, wake_at_us=None)
        result = self.executor.execute(plan)
        failed = {failure.request_id for failure in result.failed}
        for place, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            if sequence.request_id in failed:
                continue
            sequence.num_computed += len(row.token_ids)
            if row.samples:
                sequence.output.append(result.sampled_token_ids[place])
                sequence.margins += result.margins[place : place + 1]
        return result

    def run(self, sequence: Sequenced, num_tokens: int, chunk: int = 512) -> list[int]:
        while len(sequence.output) < num_tokens:
            self.step([sequence], chunk)
        return sequence.output

    def drop(self, sequence: Sequenced) -> None:
        """Recompute: the blocks go back and everything is computed again."""
        self.free[:0] = sequence.table
        sequence.table, sequence.num_computed, sequence.num_saved = [], 0, 0

    def save_ahead(self, sequence: Sequenced) -> None:
        """Copy to the host what no later token changes; the sequence runs on."""
        self.step([], swap_out=self._unsaved(sequence, sequence.num_computed // self.executor.shape.block_size))

    def _unsaved(self, sequence: Sequenced, end: int) -> list[BlockCopy]:
        first, sequence.num_saved = sequence.num_saved, max(sequence.num_saved, end)
        return self._pairs(sequence, first, end)

    @staticmethod
    def _pairs(sequence: Sequenced, first: int, end: int) -> list[BlockCopy]:
        host = sequence.first_host_block
        return [BlockCopy(sequence.request_id, sequence.table[i], host + i) for i in range(first, end)]

    def through_the_host(self, sequence: Sequenced) -> None:
        """Swap out what is not saved, spoil the device blocks, swap in to other blocks."""
        num_blocks = len(sequence.table)
        self.step([], swap_out=self._unsaved(sequence, num_blocks))
        for block in sequence.table:
            self.executor.cache.device_pool[block].fill_(7.0)
        self.free[:0] = sequence.table
        sequence.table = [self.free.pop() for _ in range(num_blocks)]
        self.step([], swap_in=self._pairs(sequence, 0, num_blocks))
        sequence.num_saved = 0


@pytest.fixture
def driver(tiny_executor: ModelExecutor) -> Driver:
    return Driver(tiny_executor)


@pytest.fixture(scope="session")
def drive() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def tiny_logits(tiny_reference: LlamaForCausalLM) -> Callable[[Sequence[int]], Tensor]:
    """transformers' logits [tokens, vocabulary] of a prompt."""

    def of(token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return tiny_reference(torch.tensor([list(token_ids)])).logits[0]

    return of


@pytest.fixture(scope="session")
def tiny_alone(tiny_reference: LlamaForCausalLM) -> Callable[[Sequence[int], int], list[int]]:
    """transformers' greedy tokens after a prompt."""

    def of(prompt: Sequence[int], num_tokens: int) -> list[int]:
        if not num_tokens:
            return []
        with torch.no_grad():
            whole = tiny_reference.generate(
                torch.tensor([list(prompt)]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1
            )
        tokens: list[int] = whole[0, len(prompt) :].tolist()
        return tokens

    return of
