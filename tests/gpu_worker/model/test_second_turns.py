"""A chat goes on: its second turn finds its first prompt and the answer, and says what it says without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.device.building import build
from scheduler_engine.policy import PriorityClass
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import SamplingParameters

BLOCK = 16
SECRET = b"secret of this boot" * 2
GREEDY = SamplingParameters(temperature=0.0)
SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)
PROMPT = [(index * 29 + 7) % 259 for index in range(70)]  # ends in the middle of a block
QUESTION = [5, 6, 7]


def worker(folder: Path, *, is_sharing: bool = True, **sizes: int) -> ModelWorker:
    executor = build(folder, kv_mib=4, host_kv_mib=4, threads=0)
    return ModelWorker(executor, prefix_keys=PrefixKeys(SECRET, BLOCK) if is_sharing else None, **sizes)


def ask(made: ModelWorker, name: str, prompt: list[int], salt: str = "aurora", **fields: object) -> list[int]:
    made.submit(name, prompt, cache_salt=salt, **{"sampling": GREEDY, "max_tokens": 60, **fields})
    made.run()
    return made.tokens[name, 0]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_second_turn_finds_prompt_and_answer_and_gives_the_same_text(
    tiny_folder: Path, sampling: SamplingParameters
) -> None:
    texts = []
    for is_sharing in (True, False):
        made = worker(tiny_folder, is_sharing=is_sharing)
        answer = ask(made, "first", PROMPT, sampling=sampling)
        second = ask(made, "second", [*PROMPT, *answer, *QUESTION], sampling=sampling)
        texts.append((answer, second))
        cached = made.usages["second"].cached_tokens
        assert cached == ((70 + 60 - 1) // BLOCK * BLOCK if is_sharing else 0)
    assert texts[0] == texts[1]


def test_an_answer_that_began_elsewhere_is_found_with_all_of_it(tiny_folder: Path) -> None:
    """Tokens delivered by an earlier attempt are computed here as a prompt is, and named with the next full block."""
    made = worker(tiny_folder)
    whole = ask(made, "whole", PROMPT)
    other = worker(tiny_folder)
    rest = {"delivered_token_ids": (tuple(whole[:30]),), "attempt": 2}
    other.submit("taken up", PROMPT, cache_salt="aurora", sampling=GREEDY, max_tokens=60, **rest)
    other.tokens["taken up", 0] = list(whole[:30])
    other.run()
    assert other.tokens["taken up", 0] == whole
    ask(other, "second", [*PROMPT, *whole, *QUESTION])
    assert other.usages["second"].cached_tokens == (70 + 60 - 1) // BLOCK * BLOCK


def test_an_answer_is_not_found_under_another_salt_nor_after_the_salt_has_changed(tiny_folder: Path) -> None:
    made = worker(tiny_folder)
    answer = ask(made, "first", PROMPT)
    turn = [*PROMPT, *answer, *QUESTION]
    said = [ask(made, salt, turn, salt=salt) for salt in ("stranger", "aurora, new salt", "")]
    assert [made.usages[salt].cached_tokens for salt in ("stranger", "aurora, new salt", "")] == [0, 0, 0]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("host_kv_mib", [0, 4])
def test_answers_of_a_flood_that_is_pushed_out_are_found_and_right(tiny_folder: Path, host_kv_mib: int) -> None:
    executor = build(tiny_folder, kv_mib=4, host_kv_mib=host_kv_mib, threads=0)
    made = ModelWorker(executor, num_slots=4, num_blocks=26, prefix_keys=PrefixKeys(SECRET, BLOCK))
    flood = {f"bulk {index}": [*PROMPT[: 40 + index], index] for index in range(6)}
    for name, prompt in flood.items():
        fields = {"tenant_id": "bulk", "priority_class": PriorityClass.BATCH, "sampling": GREEDY}
        made.submit(name, prompt, cache_salt="bulk", max_tokens=50, **fields)
    for index in range(3):
        for _ in range(9):
            made.turn()
        made.submit(f"chat {index}", [index, *PROMPT * 3], cache_salt="aurora", sampling=GREEDY)
    made.run(3_000)
    pushed = [usage.counters for usage in made.usages.values()]
    assert sum(counters.num_swaps if host_kv_mib else counters.num_recomputes for counters in pushed) > 0
    plain = worker(tiny_folder, is_sharing=False)
    num_found = 0
    for name, prompt in flood.items():
        turn = [*prompt, *made.tokens[name, 0], *QUESTION]
        assert ask(made, f"second {name}", turn, salt="bulk") == ask(plain, f"second {name}", turn), name
        num_found += made.usages[f"second {name}"].cached_tokens
    assert num_found > 0
