"""The same tokens for every family of models, drawn greedily or from a seed, whatever a request goes through.

Strictly equal: tiny models whose margins are far above what rounding moves. Events are forced by hand first, each at
any step; then the real engine composes them as it likes, in a pool that is too small.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_worker.device.building import assemble
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.models.config import FAMILIES, Llama3Rope
from gpu_worker.models.llama import Llama
from gpu_worker.models.random_weights import TINY, RandomWeights
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.gpu_worker.model.house import GREEDY, SPOILED, Asked, House, must_say_what_each_says_alone, on_late_streams
from wire.messages import SamplingParameters

SEEDED = SamplingParameters(temperature=0.9, top_p=0.95, seed=11)
NUM_TOKENS = 18
PROMPT = [(7 * index + 3) % 259 for index in range(37)]
OF_FAMILY = {
    "SmolLM2: grouped heads, tied": TINY,
    "Llama 2: all heads, untied": replace(TINY, num_kv_heads=4, tied_embeddings=False),
    "Llama 3: frequencies": replace(TINY, rope=Llama3Rope(8.0, 1.0, 4.0, 32), rope_theta=500_000.0),
    "Mistral: a window of 80": replace(TINY, context_length=80, num_kv_heads=1),
    "Qwen 2: biases": replace(TINY, qkv_bias=True),
    "Qwen 3: norms of heads, wide heads": replace(TINY, qk_norm=True, head_dim=32),
}


class LivelyWeights(RandomWeights):
    """Random norms and biases too: with ones and zeros a mistake in them would not show."""

    def tensor(self, name: str, *shape: int) -> Tensor:
        found = super().tensor(name, *shape)
        if "norm" in name or name.endswith(".bias"):
            found += 0.1 * super().tensor(name.replace("norm", "n").replace(".bias", ".b"), *shape) / self._deviation
        return found


@cache
def executor_of(family: str) -> ModelExecutor:
    seed = 2 if family.startswith("Qwen 2") else 0  # with 0 two of its logits come too near each other
    executor = assemble(Llama(LivelyWeights(OF_FAMILY[family], seed=seed)), kv_mib=2, host_kv_mib=2)
    executor.with_margins = True
    return executor


def test_every_family_has_its_tiny_model() -> None:
    assert {config.qkv_bias for config in OF_FAMILY.values()} == {family.qkv_bias for family in FAMILIES.values()}
    assert {config.qk_norm for config in OF_FAMILY.values()} == {family.qk_norm for family in FAMILIES.values()}


class Pair:
    """Two with the same prompt, one greedy, one from a seed, on one driver. Always: free blocks are spoiled."""

    def __init__(self, driver: Any, sizes: Sequence[int] = ()) -> None:
        self.driver = driver
        self.both = [driver.add("greedy", PROMPT, GREEDY), driver.add("seeded", PROMPT, SEEDED)]
        self.both[1].first_host_block = 16
        self.others = [driver.add(f"other {i}", [(i * 31 + j) % 259 for j in range(n)]) for i, n in enumerate(sizes)]
        self.num_names = self.num_said = 0

    @property
    def is_done(self) -> bool:
        return all(len(one.output) >= NUM_TOKENS for one in self.both)

    def step(self, chunk: int = 512) -> None:
        going_on = [one for one in self.both if len(one.output) < NUM_TOKENS]
        self.driver.step([*self.others, *going_on], chunk)
        self.others = [one for one in self.others if len(one.tokens) < 70]
        pool = self.driver.executor.cache.device_pool
        pool[torch.tensor(self.driver.free, dtype=torch.int64)] = SPOILED

    def swap(self) -> None:
        for one in self.both:
            self.driver.through_the_host(one)

    def drop(self) -> None:
        for one in self.both:
            self.driver.drop(one)

    def save(self) -> None:
        for one in self.both:
            self.driver.save_ahead(one)

    def lend(self) -> None:
        """Another computed what they begin with: they are dropped, and go on behind its full blocks."""
        self.drop()
        for one in self.both:
            self.num_names += 1
            first = self.driver.add(f"first {self.num_names}", one.tokens)
            self.driver.step([first])
            num_blocks = (len(one.tokens) - 1) // 16
            one.table, one.num_computed = first.table[:num_blocks], num_blocks * 16
            self.driver.free[:0] = first.table[num_blocks:]

    def join(self, size: int) -> None:
        self.num_names += 1
        self.others.append(self.driver.add(f"joined {self.num_names}", [size] * size))

    def leave(self) -> None:
        for one in self.others[:1]:
            self.driver.drop(one)
        del self.others[:1]

    def said(self) -> list[list[int]]:
        return [one.output[:NUM_TOKENS] for one in self.both]


def run(pair: Pair, each_step: Callable[[], None], chunk: int = 512) -> list[list[int]]:
    while not pair.is_done:
        pair.step(chunk)
        if not pair.is_done:
            each_step()
    return pair.said()


def dropped_when_it_has_said_more(pair: Pair) -> None:
    num_said = sum(len(one.output) for one in pair.both)
    if num_said > pair.num_said:
        pair.num_said = num_said
        pair.drop()


def saved_and_swapped(pair: Pair) -> None:
    pair.save()
    if len(pair.both[0].output) % 3 == 0:
        pair.swap()


@cache
def said_alone(family: str, drive: Any) -> tuple[list[list[int]], float]:
    said, margin = [], 1.0
    for place in range(2):
        pair = Pair(drive(executor_of(family)))
        del pair.both[1 - place]
        said += run(pair, lambda: None)
        margin = min(margin, *pair.both[0].margins) if place == 0 else margin
    return said, margin


@pytest.mark.parametrize("family", OF_FAMILY)
def test_alone_batched_chunked_swapped_recomputed_found_and_saved_ahead_it_says_the_same(
    family: str, drive: Any
) -> None:
    expected, margin = said_alone(family, drive)
    assert margin > 1e-3  # so that equality means something
    assert len(set(expected[0])) > 8
    assert expected[0] != expected[1]

    def new(*sizes: int) -> Pair:
        return Pair(drive(executor_of(family), seed=len(sizes)), sizes)

    batched, chunked, swapped, dropped, lent, saved = new(1, 9, 30, 50), new(), new(3), new(5), new(), new(20)
    assert run(batched, lambda: None) == expected
    assert run(chunked, lambda: None, chunk=7) == expected
    assert run(swapped, swapped.swap) == expected
    assert run(dropped, lambda: dropped_when_it_has_said_more(dropped), chunk=16) == expected
    assert run(lent, lent.lend) == expected
    assert run(saved, lambda: saved_and_swapped(saved)) == expected


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1, 3, 7, 16, 40, 512])),
        st.tuples(st.sampled_from(["swap", "drop", "save", "lend", "leave"])),
        st.tuples(st.just("join"), st.integers(1, 40)),
    ),
    min_size=4,
    max_size=30,
)


def compose(family: str, drive: Any, events: list[tuple[Any, ...]]) -> None:
    expected, _ = said_alone(family, drive)
    pair = Pair(drive(executor_of(family)), (1, 20))
    for name, *arguments in events:
        if not pair.is_done:
            getattr(pair, name)(*arguments)
    assert run(pair, lambda: None) == expected


PLAIN = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=6, deadline=None, suppress_health_check=PLAIN)
@given(family=st.sampled_from(sorted(OF_FAMILY)), events=_EVENTS)
def test_any_composition_of_events_gives_the_same_tokens(drive: Any, family: str, events: Any) -> None:
    compose(family, drive, events)


@pytest.mark.soak
@settings(max_examples=600, deadline=None, suppress_health_check=PLAIN)
@given(family=st.sampled_from(sorted(OF_FAMILY)), events=_EVENTS)
def test_six_hundred_compositions_of_events_give_the_same_tokens(drive: Any, family: str, events: Any) -> None:
    compose(family, drive, events)


def crowd(drive: Any, seed: int) -> House:
    """A pool, a host and a policy by chance, and whoever comes: each says what it says alone."""
    chance = random.Random(seed)
    family = chance.choice(sorted(set(OF_FAMILY) - {"Mistral: a window of 80"}))
    executor = assemble(executor_of(family)._runner.model, kv_mib=2, host_kv_mib=2)
    executor.with_margins = True
    if chance.random() < 0.5:
        on_late_streams(executor, chance.randint(1, 4))
    house = House(
        executor,
        num_blocks=chance.randint(17, 30),
        num_host_blocks=chance.choice((0, 4, 12, 60)),
        num_slots=chance.randint(2, 6),
        step_us=30_000,
        chunk_max=chance.choice((16, 32, 128)),
        floor_percent=0,
    )
    shared = [(seed + 5 * place) % 259 for place in range(64)]
    asked: dict[str, Asked] = {}
    for number in range(12):
        rank = PriorityClass(chance.choice((0, 1, 2, 2, 2)))
        begins_alike = chance.random() < 0.4
        own = [chance.randrange(259) for _ in range(chance.choice((3, 20, 60, 120)))]
        prompt = [*shared, *own] if begins_alike else own
        one = Asked(prompt, rank, SEEDED if number % 2 else GREEDY, chance.choice((1, 10, 30)))
        name = f"{rank.label} {number}"
        asked[name] = one
        keys = tuple(f"shared/{index}".encode() for index in range(4)) if begins_alike else ()
        house.ask(name, one, prefix_keys=keys, tenant=f"tenant {number % 5}")
        for _ in range(chance.randint(0, 7)):
            house.step()
        if chance.random() < 0.2:
            house.engine.cancel(RequestId(chance.choice(sorted(asked))), "client", house.now_us)
    house.run()
    must_say_what_each_says_alone(house, drive, asked)
    return house


@pytest.mark.parametrize("seed", range(2))
def test_under_the_engine_whoever_comes_and_goes_says_what_it_says_alone(drive: Any, seed: int) -> None:
    crowd(drive, seed)


@pytest.mark.soak
def test_two_hundred_crowds_pull_every_lever_and_change_no_text(drive: Any) -> None:
    levers: set[str] = set()
    for seed in range(100, 300):
        levers |= set(crowd(drive, seed).levers)
    assert levers == {"hold", "swap", "recompute"}
