"""SmolLM2 under the real engine in a pool so tight that every lever is pulled: each text is the text it gives alone."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.house import NUM_TOKENS, House
from wire.encoding import TextEncoder
from wire.messages import SamplingParameters

pytestmark = pytest.mark.soak

GREEDY = SamplingParameters(temperature=0.0)
LEAST_MARGIN = 1e-3  # contracts: two logits nearer than this may change places when the batch is another
TOPICS = ("rain", "bread", "Vienna", "whales", "prime numbers", "the moon", "clocks", "salt", "trains", "violins")
TASKS = ("Explain {} to a child.", "Write one line about {}.", "List three facts about {}.", "What is {}?")
NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_SLOTS = 18, 4, 6
STEP_US = 30_000


class Asked(NamedTuple):
    name: str
    prompt: list[int]
    rank: PriorityClass


@pytest.fixture(scope="module")
def executor(demo_model_path: Path) -> ModelExecutor:
    executor = build(demo_model_path, kv_mib=48, host_kv_mib=12, threads=0)
    executor.with_margins = True
    return executor


@pytest.fixture(scope="module")
def asked(demo_model_path: Path) -> list[Asked]:
    """40 chats of one to twelve questions; the long ones push out memory, the short ones slots."""
    encoder = TextEncoder.of_model(demo_model_path)
    chance = random.Random(5)
    found = []
    for number in range(40):
        rank = PriorityClass(chance.choice((0, 0, 1, 2, 2)))
        num_questions = chance.choice((1, 2, 5, 8) if rank is PriorityClass.BATCH else (1, 1, 5, 12))
        questions = " ".join(chance.choice(TASKS).format(chance.choice(TOPICS)) for _ in range(num_questions))
        text = f"<|im_start|>user\n{questions}<|im_end|>\n<|im_start|>assistant\n"
        prompt = encoder.encode([(True, text)])
        found.append(Asked(f"{rank.label} {number}", prompt, rank))
    return found


def in_the_crowd(executor: ModelExecutor, asked: list[Asked]) -> House:
    """Lower classes first, so that each that comes later meets a full house of those it may push out."""
    house = House(executor, NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_SLOTS, STEP_US)
    low = [one for one in asked if one.rank is PriorityClass.BATCH]
    for one in low:
        house.submit(one.name, one.prompt, one.rank, GREEDY)
    for one in (one for one in asked if one.rank is not PriorityClass.BATCH):
        for _ in range(6):
            house.step()
        house.submit(one.name, one.prompt, one.rank, GREEDY)
    house.run()
    return house


def test_held_swapped_and_recomputed_each_request_says_what_it_says_alone(
    executor: ModelExecutor, asked: list[Asked], drive: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    house = in_the_crowd(executor, asked)
    assert set(house.levers) == {"hold", "swap", "recompute"}, house.levers
    near_ties, wrong = [], []
    for one in asked:
        alone = drive(executor).add(one.name, one.prompt)
        drive(executor).run(alone, NUM_TOKENS)
        said = house.tokens[one.name]
        assert len(said) == NUM_TOKENS
        apart = next((place for place in range(NUM_TOKENS) if said[place] != alone.output[place]), None)
        if apart is not None:
            (near_ties if alone.margins[apart] < LEAST_MARGIN else wrong).append((one.name, alone.margins[apart]))
    with capsys.disabled():
        sys.stdout.write(f"\n{len(asked)} requests, {dict(house.levers)}; apart at a near tie: {near_ties or 'none'}\n")
    assert wrong == []
    assert len(near_ties) <= len(asked) // 10
