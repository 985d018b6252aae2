"""The same 64 greedy tokens whatever a request goes through: batch, chunk, swap, recompute, block order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from wire.messages import SamplingParameters

NUM_TOKENS = 64
PROMPT = [(7 * index + 3) % 259 for index in range(37)]


@pytest.fixture(scope="module")
def expected(tiny_reference: Any) -> list[int]:
    with torch.no_grad():
        whole = tiny_reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1
        )
    tokens: list[int] = whole[0, len(PROMPT) :].tolist()
    return tokens


def test_alone_it_gives_the_tokens_that_transformers_gives(driver: Any, expected: Sequence[int]) -> None:
    sequence = driver.add("aurora", PROMPT)
    assert driver.run(sequence, NUM_TOKENS) == expected
    assert min(sequence.margins) > 1e-3  # so that equality means something
    assert len(set(expected)) > 20


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_in_chunks_changes_nothing(driver: Any, expected: Sequence[int], chunk: int) -> None:
    assert driver.run(driver.add("aurora", PROMPT), NUM_TOKENS, chunk) == expected


def test_among_31_others_of_mixed_lengths_it_gives_the_same_tokens(driver: Any, expected: Sequence[int]) -> None:
    aurora = driver.add("aurora", PROMPT)
    flood = [driver.add(f"bulk {i}", [(i * 11 + j) % 259 for j in range(1 + 5 * i)]) for i in range(31)]
    waiting, running = list(flood), [aurora]
    while len(aurora.output) < NUM_TOKENS:
        running += [waiting.pop() for _ in range(min(2, len(waiting)))]  # prefills and decodes share steps
        driver.step(running, chunk=24)
    assert aurora.output[:NUM_TOKENS] == expected


def test_each_of_32_mixed_requests_gives_what_it_gives_alone(driver: Any) -> None:
    prompts = [[(i * 13 + j * 5) % 259 for j in range(1 + 3 * i)] for i in range(32)]
    alone = [list(driver.run(driver.add(f"alone {i}", prompt), 8)) for i, prompt in enumerate(prompts)]
    together = [driver.add(f"together {i}", prompt) for i, prompt in enumerate(prompts)]
    for _ in range(8):
        driver.step(together)
    assert [sequence.output for sequence in together] == alone


def test_swapped_out_and_in_at_every_token_it_gives_the_same_tokens(driver: Any, expected: Sequence[int]) -> None:
    sequence = driver.add("bulk", PROMPT)
    while len(sequence.output) < NUM_TOKENS:
        driver.step([sequence])
        driver.through_the_host(sequence)
    assert sequence.output == expected


def test_swapped_in_the_middle_of_its_prefill_it_gives_the_same_tokens(driver: Any, expected: Sequence[int]) -> None:
    sequence = driver.add("bulk", PROMPT)
    while not sequence.output:
        driver.step([sequence], chunk=5)
        driver.through_the_host(sequence)
    assert driver.run(sequence, NUM_TOKENS) == expected


@pytest.mark.parametrize("chunk", [16, 512])
def test_recomputed_at_every_token_it_gives_the_same_tokens(driver: Any, expected: Sequence[int], chunk: int) -> None:
    sequence = driver.add("bulk", PROMPT)
    while len(sequence.output) < NUM_TOKENS:
        num_before = len(sequence.output)
        while len(sequence.output) == num_before:
            driver.step([sequence], chunk)
        driver.drop(sequence)
    assert sequence.output == expected


def test_blocks_written_by_an_earlier_owner_leave_no_trace(driver: Any, expected: Sequence[int]) -> None:
    earlier = driver.add("nova", [9] * 200)
    driver.run(earlier, 20)
    driver.drop(earlier)
    assert driver.run(driver.add("aurora", PROMPT), NUM_TOKENS) == expected


def test_a_seeded_request_draws_the_same_tokens_alone_in_a_batch_and_after_recompute(driver: Any) -> None:
    seeded = SamplingParameters(temperature=1.0, top_p=0.95, seed=11)
    alone = driver.run(driver.add("alone", PROMPT, seeded), 24)
    batched = driver.add("batched", PROMPT, seeded)
    others = [driver.add(f"other {i}", [i + 1] * 20, SamplingParameters(temperature=1.0)) for i in range(7)]
    for wanted in (9, 24):
        driver.drop(batched)
        while len(batched.output) < wanted:
            driver.step([*others, batched], chunk=10)
    assert batched.output == alone
