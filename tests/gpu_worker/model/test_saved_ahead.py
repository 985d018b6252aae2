"""Copies made ahead of need, on the real model: who gives way in a full pool says what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_worker.device.building import build
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.house import NUM_TOKENS, House
from wire.messages import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)
STEP_US = 30_000


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 17 + j * 3 + 1) % 259 for j in range(length)]


def test_a_flood_that_was_saved_before_it_gave_way_says_what_it_says_alone(tiny_folder: Path, drive: Any) -> None:
    """S61, S28: the blocks go to the chat in the same step; only what was not saved is copied then."""
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=4, threads=0)
    house = House(executor, num_blocks=24, num_host_blocks=64, num_slots=8, step_us=STEP_US)
    asked = {f"bulk {i}": (prompt_of(i, 100 + i), SEEDED if i % 2 else GREEDY, PriorityClass.BATCH) for i in range(6)}
    asked |= {f"chat {i}": (prompt_of(20 + i, 60), GREEDY, PriorityClass.INTERACTIVE) for i in range(5)}
    for name, (prompt, sampling, rank) in asked.items():
        if rank is PriorityClass.INTERACTIVE:
            for _ in range(10):
                house.step()
        house.submit(name, prompt, rank, sampling)
    house.run()
    load = house.engine.load(house.now_us)
    assert load.num_blocks_saved_ahead > 10
    assert house.levers["swap"] > 0
    assert (load.num_free_blocks, load.num_free_host_blocks) == (24, 64)
    alone = drive(executor)
    for name, (prompt, sampling, _) in asked.items():
        assert house.tokens[name] == alone.run(alone.add(name, prompt, sampling), NUM_TOKENS), name
