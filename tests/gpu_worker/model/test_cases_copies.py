"""Copies, fences and what lies in a block: the case list's sections B and D on the real model.

The house spoils what is free after every step, so a block that is read by one who did not write it changes a text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.gpu_worker.model.house import (
    COST,
    GREEDY,
    Asked,
    ComparedCopies,
    House,
    must_say_what_each_says_alone,
    on_late_streams,
)
from wire.messages import SamplingParameters

SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)
STEP_US = 30_000
CHAT = PriorityClass.INTERACTIVE


@pytest.fixture
def executor(tiny_folder: Path) -> ModelExecutor:
    return build(tiny_folder, kv_mib=1, host_kv_mib=1, threads=0)


def text(index: int, length: int) -> list[int]:
    return [(index * 17 + j * 3 + 1) % 259 for j in range(length)]


def keys(name: str, num_blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}/{index}".encode() for index in range(num_blocks))


def flood_and_chats(house: House) -> dict[str, Asked]:
    """Six long ones at once, and three chats that come into the full pool."""
    asked = {f"bulk {i}": Asked(text(i, 60 + 7 * i), sampling=SEEDED if i % 2 else GREEDY) for i in range(6)}
    for name, one in asked.items():
        house.ask(name, one)
    for index in range(3):
        for _ in range(8):
            house.step()
        asked[f"chat {index}"] = Asked(text(20 + index, 130), CHAT, num_tokens=8)
        house.ask(f"chat {index}", asked[f"chat {index}"])
    house.run()
    return asked


@pytest.mark.parametrize("num_staged", [1, 3])
def test_a_victims_blocks_are_written_in_the_step_of_its_copy_and_the_slow_copy_is_true(
    executor: ModelExecutor, drive: Any, num_staged: int
) -> None:
    """S61, S27, S51: the bus is as slow as can be, and no step waits for it, reads too early or writes too soon."""
    on_late_streams(executor, num_staged)
    compared = ComparedCopies(executor)
    house = House(executor, num_blocks=24, num_host_blocks=60, num_slots=6, step_us=STEP_US)
    asked = flood_and_chats(house)
    assert house.num_reused_at_once > 0
    assert compared.num_compared > 0
    must_say_what_each_says_alone(house, drive, asked)


def test_two_that_share_eight_blocks_are_both_pushed_out_and_both_come_back(
    executor: ModelExecutor, drive: Any
) -> None:
    """S28: each shared block is given back once by each, and goes when the second has gone."""
    on_late_streams(executor, num_staged=2)
    house = House(executor, num_blocks=24, num_host_blocks=60, num_slots=4, step_us=STEP_US)
    shared = text(1, 128)
    asked = {name: Asked([*shared, *text(index, 9)], num_tokens=12) for index, name in enumerate(("first", "second"))}
    for name, one in asked.items():
        house.ask(name, one, prefix_keys=keys("shared", 8))
        house.run_until_said(name, 1)
    assert house.engine._state.device.num_shared == 8
    asked["chat"] = Asked(text(9, 270), CHAT, num_tokens=4)
    house.ask("chat", asked["chat"])
    house.run()
    assert {preempted.request_id for _, preempted in house.preempted} == {"first", "second"}
    assert sum(end.cached_tokens for end in house.ends.values()) >= 128
    must_say_what_each_says_alone(house, drive, asked)


def test_what_came_back_from_the_host_is_never_taken_for_what_is_cached(executor: ModelExecutor, drive: Any) -> None:
    """S30: one ends and is cached, another with its prefix goes out and in while the cache is evicted, a third comes.

    The house compares the bytes behind every key with those it had at first.
    """
    house = House(executor, num_blocks=20, num_host_blocks=60, num_slots=4, step_us=STEP_US)
    shared = text(2, 96)
    asked = {name: Asked([*shared, *text(i, 20)], num_tokens=14) for i, name in enumerate(("a", "b", "c"))}
    house.ask("a", asked["a"], prefix_keys=keys("shared", 6))
    house.run()
    assert house.engine._state.device.num_cached == 6
    house.ask("b", asked["b"], prefix_keys=keys("shared", 6))
    house.run_until_said("b", 3)
    asked["chat"] = Asked(text(30, 300), CHAT, num_tokens=3)
    house.ask("chat", asked["chat"])
    while not house.ends.get("chat"):
        house.step()
    house.ask("c", asked["c"], prefix_keys=keys("shared", 6))
    house.run()
    assert [(preempted.request_id, preempted.lever.value) for _, preempted in house.preempted] == [("b", "swap")]
    must_say_what_each_says_alone(house, drive, asked)


def test_a_host_that_is_almost_full_takes_the_victim_that_still_fits(executor: ModelExecutor, drive: Any) -> None:
    """S57: the long one would have to be computed again; the short one's copy is cheaper, and it goes."""
    house = House(executor, num_blocks=42, num_host_blocks=12, num_slots=4, step_us=STEP_US)
    asked = {"long": Asked(text(1, 400)), "short": Asked(text(2, 150))}
    for name, one in asked.items():
        house.ask(name, one)
    for name in asked:
        house.run_until_said(name, 2)
    asked["chat"] = Asked(text(3, 110), CHAT, num_tokens=4)
    house.ask("chat", asked["chat"])
    house.step()
    assert [(preempted.request_id, preempted.lever.value) for _, preempted in house.preempted] == [("short", "swap")]
    house.run()
    must_say_what_each_says_alone(house, drive, asked)


def test_a_host_without_any_room_left_costs_a_recompute_and_no_token(executor: ModelExecutor, drive: Any) -> None:
    """S57: the host pool is full; what can be copied is copied, the rest is computed again."""
    house = House(executor, num_blocks=24, num_host_blocks=5, num_slots=6, step_us=STEP_US)
    asked = flood_and_chats(house)
    assert house.levers["recompute"] > 0
    must_say_what_each_says_alone(house, drive, asked)


@pytest.mark.parametrize("bit_equal", [False, True])
def test_each_victim_goes_by_the_lever_that_is_cheaper_for_it(
    executor: ModelExecutor, drive: Any, bit_equal: bool
) -> None:
    """S58, S65: a short context is computed again, a long one copied, and one that must be bit-equal always so."""
    slow_bus = replace(COST, base_ns=29_000_000, prefill_token_ns=10_000, prefill_context_ns=300, copy_bytes_per_us=15)
    house = House(executor, num_blocks=60, num_host_blocks=60, num_slots=4, step_us=STEP_US, cost=slow_bus)
    compared = ComparedCopies(executor)
    asked = {"long": Asked(text(1, 330)), "short": Asked(text(2, 40), sampling=SEEDED)}
    for name, one in asked.items():
        house.ask(name, one, reproducible=bit_equal)
    for name in asked:
        house.run_until_said(name, 2)
    for index in range(2):  # together they need all 60 blocks
        asked[f"chat {index}"] = Asked(text(3 + index, 470), CHAT, num_tokens=4)
        house.ask(f"chat {index}", asked[f"chat {index}"])
    house.run()
    levers = {preempted.request_id: preempted.lever.value for _, preempted in house.preempted}
    assert levers == {"long": "swap", "short": "swap" if bit_equal else "recompute"}
    assert compared.num_compared >= 21
    assert house.ends[RequestId("short")].counters.num_recomputes == (not bit_equal), "and its owner is told"
    must_say_what_each_says_alone(house, drive, asked)


def test_without_a_host_pool_nobody_is_copied_and_every_text_is_whole(tiny_folder: Path, drive: Any) -> None:
    """S60: the pool cannot copy, and says so by its size."""
    executor = build(tiny_folder, kv_mib=1, host_kv_mib=0, threads=0)
    assert executor.shape.num_host_blocks == 0
    house = House(executor, num_blocks=24, num_host_blocks=0, num_slots=6, step_us=STEP_US)
    asked = flood_and_chats(house)
    assert set(house.levers) <= {"recompute", "hold"}
    assert house.levers["recompute"] > 0
    must_say_what_each_says_alone(house, drive, asked)


def test_a_copy_made_ahead_that_had_to_go_is_not_read(executor: ModelExecutor, drive: Any) -> None:
    """S60: a checkpoint loses its place on the host to a real swap; its owner goes on, and goes out, without it."""
    house = House(executor, num_blocks=26, num_host_blocks=16, num_slots=6, step_us=STEP_US)
    asked = {f"bulk {i}": Asked(text(i, 110 + i), num_tokens=60) for i in range(3)}
    for name, one in asked.items():
        house.ask(name, one)
    num_dropped = before = 0
    for index in range(6):
        for _ in range(10):
            house.step()
            now = house.engine.load(house.now_us).num_checkpoint_blocks
            num_dropped += now < before
            before = now
        asked[f"chat {index}"] = Asked(text(20 + index, 90), CHAT, num_tokens=4)
        house.ask(f"chat {index}", asked[f"chat {index}"])
    house.run()
    assert house.engine.load(house.now_us).num_blocks_saved_ahead > 0
    assert num_dropped > 0
    assert house.levers["swap"] > 0
    must_say_what_each_says_alone(house, drive, asked)


def test_a_pool_full_of_cached_blocks_is_free_for_whoever_comes(executor: ModelExecutor, drive: Any) -> None:
    """S69."""
    house = House(executor, num_blocks=24, num_host_blocks=0, num_slots=4, step_us=STEP_US)
    asked = {}
    for index in range(4):
        asked[f"past {index}"] = Asked(text(index, 96), num_tokens=2)
        house.ask(f"past {index}", asked[f"past {index}"], prefix_keys=keys(f"past {index}", 6))
        house.run()
    assert house.engine._state.device.num_cached >= 23
    asked["next"] = Asked(text(9, 300), num_tokens=10)
    house.ask("next", asked["next"])
    house.step()
    assert len(house.engine._state.running.prefilling[PriorityClass.BATCH]) == 1
    house.run()
    must_say_what_each_says_alone(house, drive, asked)


def test_after_a_hundred_pauses_no_slot_no_block_and_no_stream_is_left_behind(
    executor: ModelExecutor, drive: Any
) -> None:
    """S71: four slots, all taken, and a chat that needs one of them a hundred times."""
    house = House(
        executor, num_blocks=60, num_host_blocks=60, num_slots=4, step_us=STEP_US, max_preemptions=200, floor_percent=0
    )
    asked = {f"bulk {i}": Asked(text(i, 30), sampling=SEEDED if i % 2 else GREEDY, num_tokens=120) for i in range(4)}
    for name, one in asked.items():
        house.ask(name, one)
    num_chats = 0
    while sum(house.levers.values()) < 100:
        num_said = min(len(house.tokens[name]) for name in asked)
        for name in asked:
            house.run_until_said(name, num_said + 1)
        for _ in range(4):  # each of a tenant that has had nothing yet
            num_chats += 1
            house.ask(f"chat {num_chats}", Asked([num_chats, 7], CHAT, num_tokens=1), tenant=f"tenant {num_chats}")
        while house.engine.num_live > 4:
            house.step()
    house.run()
    must_say_what_each_says_alone(house, drive, asked)
