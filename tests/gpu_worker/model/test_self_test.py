"""A self-test that cannot fail tests nothing: each check notices the fault it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_worker import self_test
from gpu_worker.models.random_weights import TINY, RandomWeights


def spoil_swap(bench: self_test.Bench) -> None:
    """Blocks come back from the host as they were not."""
    swap_in = bench.executor.cache.swap_in

    def spoiled(copies: Any) -> None:
        swap_in(copies)
        for copy in copies:
            bench.executor.cache.device_pool[copy.device_block].add_(0.5)

    bench.executor.cache.swap_in = spoiled  # type: ignore[method-assign]


def keep_everything(bench: self_test.Bench) -> None:
    """The pool is never short."""
    run = bench.run
    bench.run = lambda arrivals, num_blocks, num_host_blocks: run(arrivals, 60, num_host_blocks)  # type: ignore[method-assign]


def fail_all(bench: self_test.Bench) -> None:
    """One bad row takes the others with it."""
    execute = bench.executor.execute

    def spoiled(plan: Any) -> Any:
        result = execute(plan)
        if not result.failed:
            return result
        failed = [result.failed[0]._replace(request_id=row.request_id, poison=True) for row in plan.rows]
        return self_test.replace(result, failed=tuple(failed))

    bench.executor.execute = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("check", "spoil", "words"),
    [
        ("swap", spoil_swap, "a text changed on its way through swap"),
        ("recompute", keep_everything, "nobody gave way by recompute"),
        ("poison", fail_all, "took more than itself"),
    ],
)
def test_each_check_notices_its_fault(check: str, spoil: Callable[[self_test.Bench], None], words: str) -> None:
    bench = self_test.Bench()
    spoil(bench)
    with pytest.raises(self_test.CheckFailed, match=words):
        self_test.CHECKS[check](bench)


def test_random_weights_are_a_function_of_seed_and_name() -> None:
    first, again, other = RandomWeights(TINY), RandomWeights(TINY), RandomWeights(TINY, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert first.tensor(name, 4, 4).equal(again.tensor(name, 4, 4))
    assert not first.tensor(name, 4, 4).equal(other.tensor(name, 4, 4))
    assert not first.tensor(name, 4, 4).equal(first.tensor(name.replace("up", "down"), 4, 4))
