"""Fifty prompts of SmolLM2: alone, batched, chunked, swapped, recomputed, with a known prefix: the same words."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from wire.encoding import TextEncoder

pytestmark = pytest.mark.soak

NUM_TOKENS, GROUP = 12, 10
LEAST_MARGIN = 1e-3  # contracts: two logits nearer than this may change places when the batch is another
TOPICS = ("rain", "bread", "Vienna", "whales", "prime numbers", "the moon", "clocks", "salt", "trains", "violins")
TASKS = ("Explain {} to a child.", "Write one line about {}.", "List three facts about {}.", "What is {}?", "Why {}?")


def batched(driver: Any, group: list[Any]) -> None:
    while len(group[0].output) < NUM_TOKENS:
        driver.step(group)


def chunked(driver: Any, group: list[Any]) -> None:
    while any(len(one.output) < NUM_TOKENS for one in group):
        driver.step([one for one in group if len(one.output) < NUM_TOKENS], chunk=7)


def swapped(driver: Any, group: list[Any]) -> None:
    while len(group[0].output) < NUM_TOKENS:
        driver.step(group)
        for one in group:
            driver.through_the_host(one)


def recomputed(driver: Any, group: list[Any]) -> None:
    while len(group[0].output) < NUM_TOKENS:
        driver.step(group)
        if len(group[0].output) % 3 == 0:
            for one in group:
                driver.drop(one)


def found(driver: Any, group: list[Any]) -> None:
    """Each begins behind the full blocks of another with the same prompt."""
    size = driver.executor.shape.block_size
    first = [driver.add(f"first {one.request_id}", one.prompt) for one in group]
    driver.step(first)
    for one, other in zip(group, first, strict=True):
        num_blocks = (len(one.prompt) - 1) // size
        one.table, one.num_computed = other.table[:num_blocks], num_blocks * size
    batched(driver, group)


WAYS: tuple[Callable[[Any, list[Any]], None], ...] = (batched, chunked, swapped, recomputed, found)


@pytest.fixture(scope="module")
def executor(demo_model_path: Path) -> ModelExecutor:
    executor = build(demo_model_path, kv_mib=96, host_kv_mib=12, threads=0)
    executor.with_margins = True
    return executor


@pytest.fixture(scope="module")
def prompts(demo_model_path: Path) -> list[list[int]]:
    encoder = TextEncoder.of_model(demo_model_path)
    questions = [task.format(topic) for topic in TOPICS for task in TASKS]
    return [encoder.encode([(True, f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n")]) for q in questions]


@pytest.fixture(scope="module")
def alone(executor: ModelExecutor, prompts: list[list[int]], drive: Any) -> list[Any]:
    sequences = []
    for number, prompt in enumerate(prompts):
        driver = drive(executor)
        sequences.append(driver.add(f"alone {number}", prompt))
        driver.run(sequences[-1], NUM_TOKENS)
    return sequences


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_fifty_prompts_say_what_they_say_alone(
    executor: ModelExecutor,
    alone: list[Any],
    drive: Any,
    capsys: pytest.CaptureFixture[str],
    way: Callable[[Any, list[Any]], None],
) -> None:
    near_ties: list[tuple[str, int, float]] = []
    wrong: list[tuple[str, int, float]] = []
    for first in range(0, len(alone), GROUP):
        expected = alone[first : first + GROUP]
        driver = drive(executor, seed=first)
        group = [driver.add(f"{way.__name__} {first + place}", one.prompt) for place, one in enumerate(expected)]
        way(driver, group)
        for one, other in zip(expected, group, strict=True):
            said = other.output[:NUM_TOKENS]
            apart = next((place for place in range(NUM_TOKENS) if said[place] != one.output[place]), None)
            if apart is not None:
                margin = one.margins[apart]
                (near_ties if margin < LEAST_MARGIN else wrong).append((other.request_id, apart, margin))
    with capsys.disabled():
        sys.stdout.write(f"\n{way.__name__}: {len(alone)} prompts, apart at a near tie: {near_ties or 'none'}\n")
    assert wrong == []
