"""Prompts that begin alike, on the real model: the same texts, less computed, nothing across the wall of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.device.building import build
from gpu_worker.device.model_executor import ModelExecutor
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import SamplingParameters

BLOCK = 16
SYSTEM = [(index * 29 + 7) % 259 for index in range(384)]
SEEDED = SamplingParameters(temperature=0.8, top_p=0.9, seed=3)
GREEDY = SamplingParameters(temperature=0.0)


class Counting:
    """The model executor, and how many tokens it computed."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.shape = executor.shape
        self.num_tokens = 0
        self._executor = executor

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_tokens += sum(len(row.token_ids) for row in plan.rows)
        return self._executor.execute(plan)

    def forget(self, request_id: RequestId) -> None:
        self._executor.forget(request_id)

    def close(self) -> None:
        self._executor.close()


def worker(folder: Path, *, is_sharing: bool, **sizes: int) -> tuple[ModelWorker, Counting]:
    counting = Counting(build(folder, kv_mib=8, host_kv_mib=4, threads=0))
    keys = PrefixKeys(b"secret of this boot" * 2, BLOCK) if is_sharing else None
    return ModelWorker(counting, prefix_keys=keys, **sizes), counting  # type: ignore[arg-type]


def ask(made: ModelWorker, name: str, prompt: list[int], tenant: str = "aurora", **fields: object) -> list[int]:
    made.submit(name, prompt, tenant_id=tenant, cache_salt=tenant, sampling=GREEDY, **fields)
    made.run()
    return made.tokens[name, 0]


def test_a_known_prefix_of_384_tokens_is_not_computed_again_and_the_text_is_the_same(tiny_folder: Path) -> None:
    made, counting = worker(tiny_folder, is_sharing=True)
    prompt = [*SYSTEM, 5, 6, 7]
    miss = ask(made, "miss", prompt)
    num_missed = counting.num_tokens
    hit = ask(made, "hit", prompt)
    assert hit == miss
    assert len(hit) == 8
    assert num_missed == 387 + 7
    assert counting.num_tokens - num_missed == 3 + 7
    assert [made.usages[name].cached_tokens for name in ("miss", "hit")] == [0, 384]
    assert [made.usages[name].prompt_tokens for name in ("miss", "hit")] == [387, 387]


def test_another_tenant_with_the_same_prompt_computes_it_itself(tiny_folder: Path) -> None:
    made, counting = worker(tiny_folder, is_sharing=True)
    own = ask(made, "own", [*SYSTEM, 5])
    before = counting.num_tokens
    assert ask(made, "theirs", [*SYSTEM, 5], tenant="stranger") == own
    assert counting.num_tokens - before == 385 + 7
    assert made.usages["theirs"].cached_tokens == 0


@pytest.mark.parametrize("num_host_blocks", [0, 256])
def test_a_flood_that_shares_its_prompt_says_in_a_full_pool_what_each_says_alone(
    tiny_folder: Path, num_host_blocks: int
) -> None:
    prompts = {
        f"bulk {index}": [*SYSTEM[:100], *[(index * 31 + j) % 259 for j in range(20 + 9 * index)]] for index in range(8)
    }
    texts: list[dict[str, list[int]]] = []
    for is_sharing in (True, False):
        executor = build(tiny_folder, kv_mib=8, host_kv_mib=4 if num_host_blocks else 0, threads=0)
        keys = PrefixKeys(b"secret of this boot" * 2, BLOCK) if is_sharing else None
        made = ModelWorker(executor, num_slots=4, num_blocks=30 if is_sharing else None, prefix_keys=keys)
        for index, (name, prompt) in enumerate(prompts.items()):
            made.submit(
                name,
                prompt,
                tenant_id="bulk",
                cache_salt="bulk",
                max_tokens=40,
                priority_class=PriorityClass.BATCH,
                sampling=SEEDED if index % 2 else GREEDY,
            )
        for index in range(4):
            for _ in range(12):
                made.turn()
            made.submit(f"chat {index}", SYSTEM[: 200 + index], cache_salt="aurora", sampling=GREEDY)
        made.run(2_000)
        texts.append({name: made.tokens[name, 0] for name in (*prompts, *(f"chat {index}" for index in range(4)))})
        if is_sharing:
            assert sum(usage.cached_tokens for usage in made.usages.values()) > 500
            counters = [usage.counters for usage in made.usages.values()]
            assert sum(one.num_swaps if num_host_blocks else one.num_recomputes for one in counters) > 0
    assert texts[0] == texts[1]
