"""The real engine on the real executor: preempted by every lever in a full pool, a request says what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.device.building import build
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.house import NUM_TOKENS, House
from wire.messages import SamplingParameters

GREEDY = SamplingParameters(temperature=0.0)
SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)


def prompt_of(index: int) -> list[int]:
    return [(index * 17 + j * 3 + 1) % 259 for j in range(40 + index)]


@pytest.mark.parametrize(("num_host_blocks", "lever"), [(0, "recompute"), (64, "swap")])
def test_a_flood_preempted_for_chats_in_a_full_pool_says_what_it_says_alone(
    tiny_folder: Path, num_host_blocks: int, lever: str, drive: Any
) -> None:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=4, threads=0)
    house = House(executor, num_blocks=24, num_host_blocks=num_host_blocks, num_slots=4)
    flood = {f"bulk {i}": (prompt_of(i), SEEDED if i % 3 == 0 else GREEDY) for i in range(8)}
    chats = {f"chat {i}": (prompt_of(20 + i), GREEDY) for i in range(3)}
    for name, (prompt, sampling) in flood.items():
        house.submit(name, prompt, PriorityClass.BATCH, sampling)
    for name, (prompt, sampling) in chats.items():
        for _ in range(9):
            house.step()
        house.submit(name, prompt, PriorityClass.INTERACTIVE, sampling)
    house.run()
    assert house.levers[lever] > 0
    alone = drive(executor)
    for name, (prompt, sampling) in (flood | chats).items():
        assert house.tokens[name] == alone.run(alone.add(name, prompt, sampling), NUM_TOKENS), name


def test_a_request_that_breaks_the_numbers_ends_and_the_others_do_not_notice(tiny_folder: Path, drive: Any) -> None:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=0, threads=0)
    expected = list(drive(executor).run(drive(executor).add("good", prompt_of(1)), NUM_TOKENS))
    house = House(executor, num_blocks=64, num_host_blocks=0, num_slots=8)
    house.submit("good", prompt_of(1), PriorityClass.BATCH, GREEDY)
    house.submit("bad", [100_000], PriorityClass.BATCH, GREEDY)
    failed, finished = [], []
    for _ in range(60):
        plan = house.engine.plan_step(house.now_us)
        result = executor.execute(plan)
        failed += [failure.request_id for failure in result.failed]
        house.now_us += 1_000
        events = house.engine.apply_step(result, house.now_us)
        house.engine.check_books()
        house.tokens["good"] += events.tokens.token_ids
        finished += [(end.request_id, end.reason.value) for end in events.finished]
    assert failed == ["bad", "bad"]
    assert sorted(finished) == [("bad", "failed"), ("good", "length")]
    assert house.tokens["good"] == expected
