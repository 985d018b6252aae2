"""The whole model on the Triton kernels, interpreted, through the real executor: the tokens that a CPU's kernels give.

A capture is stood in for by the forward itself, so all of a decode graph but the replay is tested here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.device.building import assemble
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.kernels.compiled import TritonKernels
from gpu_worker.models.batch import pool_shape
from gpu_worker.models.llama import Llama
from gpu_worker.models.target import Target, plain_linear
from gpu_worker.models.weights import open_weights
from tests.gpu_worker.model.house import on_late_streams
from wire.messages import SamplingParameters

NUM_TOKENS = 5
PROMPT = [(7 * index + 3) % 259 for index in range(21)]
SEEDED = SamplingParameters(temperature=1.0, top_p=0.95, seed=11)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")


@pytest.fixture
def interpreted(tiny_folder: Path) -> ModelExecutor:
    weights, cpu = open_weights(tiny_folder), torch.device("cpu")
    kernels = TritonKernels(pool_shape(weights.config, 16), cpu)
    model = Llama(weights, Target(cpu, torch.float32, kernels, plain_linear))
    return assemble(model, kv_mib=1, host_kv_mib=1)


@pytest.fixture
def expected(driver: Any) -> Sequence[int]:
    """Seeded, by the kernels of a CPU, alone and whole."""
    tokens: list[int] = driver.run(driver.add("alone", PROMPT, SEEDED), NUM_TOKENS)
    assert len(set(tokens)) >= NUM_TOKENS - 1
    return tokens


@pytest.mark.parametrize("chunk", [64, 16])
def test_alone_and_in_chunks(interpreted: ModelExecutor, drive: Any, expected: Sequence[int], chunk: int) -> None:
    driver = drive(interpreted)
    assert driver.run(driver.add("aurora", PROMPT, SEEDED), NUM_TOKENS, chunk) == expected


def test_greedily(interpreted: ModelExecutor, driver: Any, drive: Any) -> None:
    expected = list(driver.run(driver.add("alone", PROMPT), NUM_TOKENS))
    compiled = drive(interpreted)
    assert compiled.run(compiled.add("aurora", PROMPT), NUM_TOKENS) == expected


def test_among_others(interpreted: ModelExecutor, drive: Any, expected: Sequence[int]) -> None:
    driver = drive(interpreted)
    aurora = driver.add("aurora", PROMPT, SEEDED)
    others = [driver.add(f"bulk {i}", [i + 1] * (1 + 20 * i)) for i in range(2)]
    while len(aurora.output) < NUM_TOKENS:
        driver.step([*others, aurora], chunk=20)
    assert aurora.output == expected


def test_swapped_on_late_streams_and_recomputed(
    interpreted: ModelExecutor, drive: Any, expected: Sequence[int]
) -> None:
    driver = drive(interpreted)
    on_late_streams(interpreted, num_staged=2)
    sequence = driver.add("bulk", PROMPT, SEEDED)
    for wanted in (3, NUM_TOKENS):
        while len(sequence.output) < wanted:
            driver.step([sequence], chunk=15)
            driver.through_the_host(sequence)
        driver.drop(sequence)
    assert sequence.output == expected


def test_decodes_replayed_in_padded_batches(interpreted: ModelExecutor, drive: Any, expected: Sequence[int]) -> None:
    replayed: list[int] = []

    def stand_in(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        size = len(forward())

        def replay() -> Tensor:
            replayed.append(size)
            return forward()

        return replay

    interpreted.capture_decodes(stand_in, sizes=(1, 4))
    driver = drive(interpreted)
    aurora, other = driver.add("aurora", PROMPT, SEEDED), driver.add("nova", [9])
    driver.run(aurora, 3)
    assert replayed == [1, 1]
    driver.step([other])
    while len(aurora.output) < NUM_TOKENS:
        driver.step([other, aurora])
    assert aurora.output == expected
    assert replayed == [1, 1, 1, 4, 4]


def test_a_step_beyond_what_was_captured_runs_as_ever(interpreted: ModelExecutor, drive: Any) -> None:
    interpreted.capture_decodes(lambda forward: forward, sizes=(1,))
    driver = drive(interpreted)
    alone = list(driver.run(driver.add("alone", [5, 6]), 3))
    pair = [driver.add(name, [5, 6]) for name in ("first", "second")]
    while len(pair[0].output) < 3:
        driver.step(pair)
    assert [sequence.output for sequence in pair] == [alone, alone]
