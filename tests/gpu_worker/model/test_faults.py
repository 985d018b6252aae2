"""Faults on the real model over the whole loop: each takes its own request with it, and nothing else."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.device.sampling import Sampler
from gpu_worker.executor import DeviceLost
from gpu_worker.models.llama import Llama
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import Attach, Cancel, Finished, SamplingParameters

POISON_TOKEN, NOT_A_TOKEN = 200, 100_000
PROMPT = [(7 * index + 3) % 199 for index in range(37)]
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture
def worker(tiny_executor: ModelExecutor) -> ModelWorker:
    return ModelWorker(tiny_executor)


@pytest.fixture
def expected(worker: ModelWorker) -> list[int]:
    worker.submit("alone", PROMPT, sampling=GREEDY)
    worker.run()
    return worker.tokens["alone", 0]


def poison(executor: ModelExecutor) -> None:
    model = executor._runner.model
    look_up = model._embedding

    def poisoned(token_ids: torch.Tensor) -> torch.Tensor:
        return look_up(token_ids).masked_fill((token_ids == POISON_TOKEN)[:, None], torch.nan)

    model._embedding = poisoned


def short_of_memory(executor: ModelExecutor, most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = executor._runner.run

    def limited(rows: Any) -> Any:
        if len(rows) > most_rows:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate it.")
        return run(rows)

    monkeypatch.setattr(executor._runner, "run", limited)


@pytest.mark.parametrize(
    ("prompt", "detail"), [([5, POISON_TOKEN, 6], "not_finite"), ([5, NOT_A_TOKEN, 6], "kernel_error")]
)
def test_a_poison_request_ends_with_an_error_free_of_charge_and_the_worker_lives_on(
    worker: ModelWorker, expected: list[int], prompt: list[int], detail: str
) -> None:
    poison(worker.executor)
    worker.submit("before", PROMPT, sampling=GREEDY)
    worker.turn()
    worker.submit("bad", prompt, sampling=GREEDY)
    worker.submit("beside", PROMPT, sampling=GREEDY)
    worker.run()
    worker.submit("after", PROMPT, sampling=GREEDY)
    worker.run()
    end = worker.ends["bad"]
    assert isinstance(end, Finished)
    assert (end.choices[0].reason, end.choices[0].detail) == ("failed", detail)
    usage = worker.usages["bad"]
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("failed_platform", 0, 0)
    assert [worker.tokens[name, 0] for name in ("before", "beside", "after")] == [expected] * 3
    snapshot = worker.loop.snapshot()
    assert (snapshot.num_free_blocks, snapshot.ready) == (snapshot.num_blocks, True)


def test_a_choice_that_fails_in_the_middle_is_charged_for_what_it_said(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.submit("bad", PROMPT, sampling=GREEDY)
    while len(worker.tokens.get(("bad", 0), [])) < 3:
        worker.turn()
    broken = torch.full((1, 259), torch.nan)
    monkeypatch.setattr(worker.executor._runner.model, "logits", lambda rows: broken.repeat(len(rows), 1))
    worker.run()
    assert worker.tokens["bad", 0] == expected[:3]
    usage = worker.usages["bad"]
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("failed_platform", len(PROMPT), 3)


def test_short_of_memory_for_a_batch_every_request_is_computed_alone(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(worker.executor, 1, monkeypatch)
    for index in range(5):
        worker.submit(f"r{index}", PROMPT, sampling=GREEDY)
    worker.run()
    assert [worker.tokens[f"r{index}", 0] for index in range(5)] == [expected] * 5


def test_short_of_memory_even_for_one_its_request_fails_and_later_ones_are_served(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        short_of_memory(worker.executor, 0, patched)
        worker.submit("early", PROMPT, sampling=GREEDY)
        worker.run()
    worker.submit("late", PROMPT, sampling=GREEDY)
    worker.run()
    end = worker.ends["early"]
    assert isinstance(end, Finished)
    assert end.choices[0].detail == "out_of_memory"
    assert worker.tokens["late", 0] == expected


def test_memory_that_is_back_in_the_next_step_costs_nobody_a_request(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        short_of_memory(worker.executor, 0, patched)
        worker.submit("patient", PROMPT, sampling=GREEDY)
        worker.turn()
    worker.run()
    assert worker.tokens["patient", 0] == expected


NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate it."


@pytest.mark.parametrize(
    ("owner", "part"), [(Llama, "forward"), (Llama, "logits"), (Sampler, "sample")], ids=["forward", "head", "draw"]
)
def test_wherever_memory_ends_the_batch_is_taken_apart_and_nobody_loses_a_token(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch, owner: Any, part: str
) -> None:
    whole = getattr(owner, part)

    def limited(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        num_tokens = len(batch.token_ids) if part == "forward" else len(batch)
        if num_tokens > (len(PROMPT) if part == "forward" else 1):
            raise RuntimeError(NO_MEMORY)
        return whole(self, batch, *arguments, **options)

    monkeypatch.setattr(owner, part, limited)
    for index in range(3):
        worker.submit(f"r{index}", PROMPT, sampling=GREEDY)
    worker.run()
    assert [worker.tokens[f"r{index}", 0] for index in range(3)] == [expected] * 3


def test_rows_are_tried_one_by_one_when_the_memory_of_the_failed_batch_is_free_again(
    worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, allocated, still_there = worker.executor._runner.run, [], []

    def hungry(rows: Any) -> Any:
        if len(rows) > 1:
            activations = torch.empty(1_000)
            allocated.append(weakref.ref(activations))
            raise RuntimeError(NO_MEMORY)
        still_there.extend(found() is not None for found in allocated)
        return run(rows)

    monkeypatch.setattr(worker.executor._runner, "run", hungry)
    for index in range(2):
        worker.submit(f"r{index}", PROMPT, sampling=GREEDY)
    worker.turn()
    assert still_there == [False, False]


def test_a_copy_that_fails_ends_the_worker_with_a_sentence(
    worker: ModelWorker, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(copies: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    driver = drive(worker.executor)
    sequence = driver.add("bulk", PROMPT)
    driver.step([sequence])
    monkeypatch.setattr(worker.executor.cache._copies, "swap_out", refuse)
    with pytest.raises(DeviceLost, match=r"^a copy between device and host failed: CUDA error: out of memory$"):
        driver.through_the_host(sequence)


def test_one_row_of_logits_that_is_not_finite_ends_its_own_request_only(
    worker: ModelWorker, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poison that shows in the head alone, in the middle of three who decode side by side."""
    logits_of, tries = worker.executor._runner.model.logits, []

    def spoiled(rows: torch.Tensor) -> torch.Tensor:
        logits = logits_of(rows)
        if len(rows) == 3 or tries:  # from the step on in which all three decode, until the one in the middle has gone
            tries.append(len(rows))
            logits[1 if len(rows) == 3 else 0] = torch.nan
        return logits

    for name in ("first", "middle", "last"):
        worker.submit(name, PROMPT, sampling=GREEDY)
    while len(worker.tokens.get(("last", 0), [])) < 2:
        worker.turn()
    with monkeypatch.context() as patched:
        patched.setattr(worker.executor._runner.model, "logits", spoiled)
        worker.turn()
    worker.run()
    assert tries == [3]
    assert [worker.tokens[name, 0] for name in ("first", "middle", "last")] == [expected] * 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_clients_that_leave_at_any_moment_leave_nothing_behind_and_change_no_other_text(
    tiny_folder: Path, seed: int, tiny_alone: Callable[[list[int], int], list[int]]
) -> None:
    """Section 7: client gone in every state, on a pool that is full, with swaps; each Submit ends once."""
    worker = ModelWorker(build(tiny_folder, kv_mib=1, host_kv_mib=1, threads=0), num_slots=4, num_blocks=20)
    dice = random.Random(seed)
    prompts: dict[str, list[int]] = {}
    for number in range(60):
        name = f"r{number}"
        prompts[name] = [dice.randrange(199) for _ in range(dice.choice([3, 40, 120, 200]))]
        worker.submit(
            name,
            prompts[name],
            sampling=GREEDY,
            max_tokens=dice.choice([1, 8, 30]),
            priority_class=PriorityClass(dice.choice([0, 2, 2])),
        )
        for _ in range(dice.randrange(4)):
            worker.turn()
        if dice.random() < 0.4:
            gone = f"r{dice.randrange(number + 1)}"
            worker.take_in(Cancel(response_id=gone, attempt=1, reason="client"))
        if dice.random() < 0.1:
            worker.take_in(
                Attach(response_id=f"r{dice.randrange(number + 1)}", attempt=2, gateway_id="g2", from_index=0)
            )
    worker.run(5_000)
    assert set(worker.usages) == set(worker.ends) == set(prompts)
    snapshot = worker.loop.snapshot()
    assert (snapshot.num_free_blocks, snapshot.num_free_host_blocks) == (snapshot.num_blocks, snapshot.num_host_blocks)
    assert not worker.executor._stream_of
    preempted = {lever for row in snapshot.classes for lever, _, _ in row.preemptions}
    assert "swap" in preempted
    for name, prompt in prompts.items():
        said = worker.tokens.get((name, 0), [])
        assert len(said) == worker.usages[name].output_tokens
        assert said == tiny_alone(prompt, len(said)), name
