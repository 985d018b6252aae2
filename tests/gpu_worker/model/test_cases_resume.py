"""Resume, ping-pong and collapse: the case list's sections C and D on the real model, under the real engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.events import Resource
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.gpu_worker.model.house import GREEDY, Asked, House, must_say_what_each_says_alone
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import Finished, SamplingParameters

SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)
STEP_US = 30_000
CHAT, DEFAULT = PriorityClass.INTERACTIVE, PriorityClass.DEFAULT
PROMPT = [(7 * index + 3) % 259 for index in range(40)]


@pytest.fixture
def executor(tiny_folder: Path) -> ModelExecutor:
    return build(tiny_folder, kv_mib=1, host_kv_mib=1, threads=0)


def text(index: int, length: int) -> list[int]:
    return [(index * 17 + j * 3 + 1) % 259 for j in range(length)]


@pytest.mark.parametrize("num_host_blocks", [0, pytest.param(60, marks=pytest.mark.soak)])
def test_who_was_pushed_out_comes_back_once_where_all_of_it_fits(
    executor: ModelExecutor, drive: Any, num_host_blocks: int
) -> None:
    """S40: three that do not fit together; nobody is let in by its first chunk to be thrown out by the next."""
    house = House(executor, num_blocks=28, num_host_blocks=num_host_blocks, num_slots=8, step_us=STEP_US, chunk_max=64)
    asked = {f"default {i}": Asked(text(i, 200), DEFAULT, num_tokens=80) for i in range(2)}
    asked["batch"] = Asked(text(5, 300), num_tokens=40)
    for name, one in asked.items():
        house.ask(name, one)
    house.run()
    for name in asked:
        memory = [step for step, p in house.preempted if p.request_id == name and p.resource is Resource.MEMORY]
        assert all(later - earlier >= 16 for earlier, later in pairwise(memory))
    must_say_what_each_says_alone(house, drive, asked)


@pytest.mark.parametrize("num_host_blocks", [0, pytest.param(40, marks=pytest.mark.soak)])
def test_when_all_need_a_block_in_the_same_step_each_comes_to_its_end(
    executor: ModelExecutor, drive: Any, num_host_blocks: int
) -> None:
    """S44."""
    house = House(
        executor, num_blocks=16, num_host_blocks=num_host_blocks, num_slots=8, step_us=STEP_US, cap_memory_percent=100
    )
    for index in range(6):  # so that all four are let in: the engine learns that answers are short
        house.ask(f"teacher {index}", Asked([index], num_tokens=2))
        house.run()
    asked = {f"bulk {i}": Asked(text(i, 62), num_tokens=60) for i in range(4)}
    for name, one in asked.items():
        house.ask(name, one)
    house.run()
    assert sum(house.levers.values()) > 0
    must_say_what_each_says_alone(house, drive, asked)


def test_when_the_last_running_request_vanishes_the_step_is_empty_and_the_next_request_is_served(
    executor: ModelExecutor, drive: Any
) -> None:
    """S49."""
    house = House(executor, num_blocks=32, num_host_blocks=0, num_slots=4, step_us=STEP_US)
    house.ask("only", Asked(PROMPT, sampling=SEEDED))
    house.run_until_said("only", 4)
    house.engine.cancel(RequestId("only"), "client", house.now_us)
    plan = house.engine.plan_step(house.now_us)
    assert plan.is_empty
    result = executor.execute(plan)
    assert result.sampled_token_ids == []
    events = house.engine.apply_step(result, house.now_us)
    assert [end.reason.value for end in events.finished] == ["cancelled"]
    executor.forget(events.finished[0].request_id)
    asked = {"next": Asked(PROMPT)}
    house.ask("next", asked["next"])
    house.run()
    must_say_what_each_says_alone(house, drive, asked)


@pytest.mark.parametrize("num_host_blocks", [0, 40], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_said", [1, 15, 16, 17])
def test_pushed_out_twice_at_any_place_in_a_block_it_says_what_it_says_alone(
    executor: ModelExecutor, drive: Any, num_said: int, num_host_blocks: int
) -> None:
    """S64, S54: what was said is replayed, in chunks, and nothing is drawn before all of it is back."""
    house = House(executor, num_blocks=10, num_host_blocks=num_host_blocks, num_slots=4, step_us=STEP_US, chunk_max=32)
    asked = {"bulk": Asked(PROMPT, sampling=SEEDED, num_tokens=40)}
    house.ask("bulk", asked["bulk"])
    for time in (1, 2):
        house.run_until_said("bulk", num_said * time)
        asked[f"chat {time}"] = Asked(text(time, 130), CHAT, num_tokens=2)
        house.ask(f"chat {time}", asked[f"chat {time}"])
        while not house.ends.get(f"chat {time}"):
            house.step()
    house.run()
    assert house.levers == {"swap" if num_host_blocks else "recompute": 2}
    counters = house.ends["bulk"].counters
    if num_host_blocks:
        assert counters.swapped_blocks > 0
    else:
        assert counters.recomputed_tokens >= 2 * (len(PROMPT) + num_said - 1)
    must_say_what_each_says_alone(house, drive, asked)


@pytest.mark.parametrize("num_host_blocks", [0, 40], ids=["recompute", "swap"])
def test_twenty_preemptions_in_chunks_of_16_change_no_token(
    executor: ModelExecutor, drive: Any, num_host_blocks: int
) -> None:
    """S66."""
    house = House(
        executor,
        num_blocks=10,
        num_host_blocks=num_host_blocks,
        num_slots=4,
        step_us=STEP_US,
        chunk_max=16,
        chunk_min=16,
        max_preemptions=100,
        floor_percent=0,
    )
    asked = {"bulk": Asked(PROMPT, num_tokens=60)}
    house.ask("bulk", asked["bulk"])
    for time in range(1, 21):
        house.run_until_said("bulk", 2 * time)
        house.ask(f"chat {time}", Asked(text(time, 115), CHAT, num_tokens=1), tenant=f"tenant {time}")
        while not house.ends.get(f"chat {time}"):
            house.step()
    house.run()
    assert house.levers == {"swap" if num_host_blocks else "recompute": 20}
    must_say_what_each_says_alone(house, drive, asked)


def test_a_long_answer_that_was_computed_again_in_its_middle_is_whole_and_charged_once(
    executor: ModelExecutor, drive: Any
) -> None:
    """S63, S54: stop strings hold tokens back while it is pushed out; none is lost, none comes twice."""
    worker = ModelWorker(executor, num_slots=4, num_blocks=28)
    worker.submit(
        "long",
        text(1, 100),
        max_tokens=300,
        priority_class=PriorityClass.BATCH,
        sampling=GREEDY,
        stop_strings=(b"never said, of this length",),
    )
    while len(worker.tokens.get(("long", 0), ())) < 150:
        worker.turn()
    worker.submit("chat", text(2, 230), max_tokens=3, sampling=GREEDY)
    worker.run(2_000)
    usage, end = worker.usages["long"], worker.ends["long"]
    assert isinstance(end, Finished)
    assert (usage.prompt_tokens, usage.output_tokens, end.choices[0].reason) == (100, 300, "length")
    assert usage.counters.num_recomputes + usage.counters.num_swaps > 0
    alone = drive(executor)
    assert worker.tokens["long", 0] == alone.run(alone.add("alone", text(1, 100)), 300)
