"""What the executor promises beside the right tokens: failures row by row, bit-equal copies, calibration, memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.device.building import build
from gpu_worker.device.kv_cache import KvCache, bytes_per_block
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.device.model_runner import arranged, layout_of
from gpu_worker.executor import DeviceLost
from gpu_worker.models.weights import WeightsError, open_weights
from scheduler_engine.plan import BlockCopy, RowFailure, ScheduledRow, StepPlan
from scheduler_engine.request import RequestId
from wire.messages import SamplingParameters, TokenLogprob

POISON_TOKEN = 200
NOT_A_TOKEN = 100_000


def plan(*rows: ScheduledRow) -> StepPlan:
    return StepPlan(1, rows, (), (), token_budget=0, wake_at_us=None)


def row(name: str, token_ids: Sequence[int], start: int, table: Sequence[int], samples: bool = True) -> ScheduledRow:
    return ScheduledRow(RequestId(name), token_ids, start, table, samples, [], SamplingParameters(temperature=0.0))


def poison(executor: ModelExecutor) -> None:
    model = executor._runner.model
    look_up = model._embedding

    def poisoned(token_ids: torch.Tensor) -> torch.Tensor:
        return look_up(token_ids).masked_fill((token_ids == POISON_TOKEN)[:, None], torch.nan)

    model._embedding = poisoned


def test_an_empty_plan_gives_an_empty_result(tiny_executor: ModelExecutor) -> None:
    result = tiny_executor.execute(plan())
    assert (result.step, list(result.sampled_token_ids), result.failed) == (1, [], ())


def test_only_a_row_that_ends_at_the_newest_token_samples(tiny_executor: ModelExecutor) -> None:
    result = tiny_executor.execute(
        plan(row("a", [1, 2, 3], 0, [0], samples=False), row("b", [1, 2, 3], 0, [1]), row("c", [9], 0, [2]))
    )
    tokens = list(result.sampled_token_ids)
    assert tokens[0] == -1
    assert min(tokens[1:]) >= 0
    assert result.failed == ()


def test_a_step_is_timed_by_the_clock_it_was_given(tiny_folder: Path) -> None:
    built = build(tiny_folder, kv_mib=1, host_kv_mib=0, threads=0)
    ticks = itertools.count(0, 5_000_000)
    executor = ModelExecutor(built._runner.model, built.cache, built.shape, clock_ns=lambda: next(ticks))
    assert executor.execute(plan(row("a", [1], 0, [0]))).duration_us == 5_000


def test_a_row_whose_numbers_are_not_finite_fails_alone(tiny_executor: ModelExecutor) -> None:
    good = row("good", [4, 5, 6], 0, [0])
    expected = list(tiny_executor.execute(plan(good)).sampled_token_ids)
    poison(tiny_executor)
    result = tiny_executor.execute(plan(row("bad", [4, POISON_TOKEN, 6], 0, [1]), good))
    assert result.failed == (RowFailure(RequestId("bad"), "not_finite", poison=False),)
    assert list(result.sampled_token_ids) == [-1, *expected]


def test_a_chunk_that_does_not_sample_is_also_watched(tiny_executor: ModelExecutor) -> None:
    poison(tiny_executor)
    result = tiny_executor.execute(plan(row("bad", [POISON_TOKEN, 6], 0, [1], samples=False)))
    assert [failure.reason for failure in result.failed] == ["not_finite"]


def test_a_request_that_is_twice_not_finite_is_poison_until_forgotten(tiny_executor: ModelExecutor) -> None:
    poison(tiny_executor)
    bad = plan(row("bad", [POISON_TOKEN], 0, [1]))
    assert [tiny_executor.execute(bad).failed[0].poison for _ in range(3)] == [False, True, True]
    tiny_executor.forget(RequestId("bad"))
    assert not tiny_executor.execute(bad).failed[0].poison


def test_blocks_of_a_failed_row_do_not_poison_their_next_owner(tiny_executor: ModelExecutor) -> None:
    heir = row("heir", [4, 5, 6], 0, [1])
    expected = list(tiny_executor.execute(plan(heir)).sampled_token_ids)
    poison(tiny_executor)
    tiny_executor.execute(plan(row("bad", [POISON_TOKEN] * 16, 0, [1])))
    assert list(tiny_executor.execute(plan(heir)).sampled_token_ids) == expected


def test_a_row_that_the_kernels_refuse_is_found_and_the_rest_is_computed(tiny_executor: ModelExecutor) -> None:
    good, other = row("good", [4, 5, 6], 0, [0]), row("other", [7], 0, [2])
    expected = list(tiny_executor.execute(plan(good, other)).sampled_token_ids)
    result = tiny_executor.execute(plan(good, row("bad", [NOT_A_TOKEN], 0, [1]), other))
    assert result.failed == (RowFailure(RequestId("bad"), "kernel_error", poison=False),)
    assert list(result.sampled_token_ids) == [expected[0], -1, expected[1]]


@pytest.mark.parametrize("with_others", [False, True])
def test_a_request_that_fails_twice_alone_is_poison(tiny_executor: ModelExecutor, with_others: bool) -> None:
    rows = [row("bad", [NOT_A_TOKEN], 0, [1]), *([row("good", [4, 5, 6], 0, [0])] if with_others else [])]
    assert [tiny_executor.execute(plan(*rows)).failed[0].poison for _ in range(2)] == [False, True]


def test_a_device_that_answers_nobody_ends_the_worker_and_blames_no_row(
    tiny_executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr(tiny_executor._runner, "run", refuse)
    assert tiny_executor.execute(plan(row("a", [1], 0, [0]))).failed[0].reason == "kernel_error"
    monkeypatch.setattr(tiny_executor, "_probe", refuse)
    with pytest.raises(DeviceLost, match=r"illegal memory access was encountered$"):
        tiny_executor.execute(plan(row("a", [1], 0, [0]), row("b", [1], 0, [1])))


def test_a_head_whose_numbers_are_not_finite_fails_each_row_that_samples_and_no_other(
    tiny_executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_of = tiny_executor._runner.model.logits
    monkeypatch.setattr(tiny_executor._runner.model, "logits", lambda rows: logits_of(rows).mul_(torch.nan))
    result = tiny_executor.execute(plan(row("a", [4], 0, [0]), row("b", [4, 5], 0, [1], samples=False)))
    assert result.failed == (RowFailure(RequestId("a"), "not_finite", poison=False),)
    assert list(result.sampled_token_ids) == [-1, -1]


def test_a_bias_on_a_token_that_does_not_exist_fails_its_row_only(tiny_executor: ModelExecutor) -> None:
    bad = row("bad", [4], 0, [1])._replace(sampling=SamplingParameters(logit_bias=((NOT_A_TOKEN, 1.0),)))
    result = tiny_executor.execute(plan(row("good", [4], 0, [0]), bad))
    assert [failure.request_id for failure in result.failed] == ["bad"]
    assert result.sampled_token_ids[0] >= 0


def test_lack_of_memory_is_told_from_other_errors(
    tiny_executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(tiny_executor._runner, "run", refuse)
    result = tiny_executor.execute(plan(row("a", [1], 0, [0])))
    assert result.failed == (RowFailure(RequestId("a"), "out_of_memory", poison=False),)


def test_a_programming_mistake_is_not_taken_for_a_row_that_fails(
    tiny_executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(tiny_executor._runner, "run", stumble)
    with pytest.raises(TypeError, match="a bug"):
        tiny_executor.execute(plan(row("a", [1], 0, [0])))


def test_logprobs_come_back_in_the_rows_places(tiny_executor: ModelExecutor) -> None:
    asking = row("asking", [4, 5], 0, [0])._replace(sampling=SamplingParameters(temperature=0.0, num_top_logprobs=3))
    result = tiny_executor.execute(plan(row("silent", [4], 0, [1]), asking))
    silent, logprob = result.logprobs
    assert silent is None
    assert isinstance(logprob, TokenLogprob)
    assert logprob.token_id == result.sampled_token_ids[1] == logprob.top[0][0]
    assert tiny_executor.execute(plan(row("silent", [4], 0, [1]))).logprobs == ()


def test_a_block_is_bit_equal_after_a_swap_through_any_host_block(tiny_folder: Path) -> None:
    cache = KvCache(open_weights(tiny_folder).config, num_blocks=4, num_host_blocks=4, block_size=16)
    cache.device_pool.copy_(torch.randn(cache.device_pool.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.device_pool.clone()
    name = RequestId("a")
    cache.swap_out([BlockCopy(name, 2, 0), BlockCopy(name, 0, 3)])
    cache.device_pool.fill_(5.0)
    cache.swap_in([BlockCopy(name, 1, 0), BlockCopy(name, 3, 3)])
    assert torch.equal(cache.device_pool[[1, 3]], before[[2, 0]])
    assert (cache.device_pool[[0, 2]] == 5.0).all()


def test_in_one_step_a_swap_out_comes_before_the_swap_in_to_the_same_block(driver: Any) -> None:
    first, second = driver.add("first", [1] * 16), driver.add("second", [2] * 16)
    expected = [list(driver.run(driver.add(f"alone {s.prompt[0]}", s.prompt), 4)) for s in (first, second)]
    driver.step([first])
    block = first.table[0]
    driver.step([], swap_out=[BlockCopy(first.request_id, block, 0)])
    driver.step([second])
    seconds_block, second.table = second.table[0], []
    driver.step(
        [],
        swap_out=[BlockCopy(second.request_id, seconds_block, 1)],
        swap_in=[BlockCopy(first.request_id, seconds_block, 0)],
    )
    first.table = [seconds_block]
    assert driver.run(first, 4) == expected[0]
    second.table = [block]
    driver.step([], swap_in=[BlockCopy(second.request_id, block, 1)])
    assert driver.run(second, 4) == expected[1]


def test_pools_take_no_memory_before_they_are_written(tiny_folder: Path) -> None:
    def resident_bytes() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    config = open_weights(tiny_folder).config
    num_blocks = (256 << 20) // bytes_per_block(config, 16)
    before = resident_bytes()
    cache = KvCache(config, num_blocks=num_blocks, num_host_blocks=num_blocks, block_size=16)
    assert cache.device_pool.nbytes == 256 << 20
    assert resident_bytes() - before < 64 << 20


def test_the_shape_tells_the_engine_what_fits(tiny_executor: ModelExecutor) -> None:
    shape = tiny_executor.shape
    assert shape.bytes_per_block == 2 * 2 * 2 * 16 * 16 * 4
    assert shape.num_blocks * shape.bytes_per_block <= 4 << 20 < (shape.num_blocks + 1) * shape.bytes_per_block
    assert (shape.block_size, shape.max_model_len, shape.copies_in_order) == (16, 512, True)


def test_a_pool_without_a_single_block_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(WeightsError, match="not even one block"):
        build(tiny_folder, kv_mib=0, host_kv_mib=0, threads=0)


def test_calibration_measures_positive_costs_and_leaves_the_pool_usable(driver: Any) -> None:
    constants = driver.executor.calibrate()
    assert min(constants.base_ns, constants.prefill_token_ns, constants.decode_row_ns, constants.kv_token_ns) > 0
    assert constants.copy_bytes_per_us > 0
    fresh = driver.executor.__class__(
        driver.executor._runner.model,
        KvCache(driver.executor._runner.model.config, num_blocks=512, num_host_blocks=0, block_size=16),
        driver.executor.shape,
    )
    expected = driver.__class__(fresh).run(driver.add("fresh", [5] * 20), 8)
    assert driver.run(driver.add("after", [5] * 20), 8) == expected


def test_calibration_fits_the_smallest_pool(tiny_folder: Path) -> None:
    model = build(tiny_folder, kv_mib=1, host_kv_mib=0, threads=0)
    shape = model.shape.__class__(
        num_blocks=1, num_host_blocks=0, block_size=16, bytes_per_block=16_384, max_model_len=512, copies_in_order=True
    )
    cache = KvCache(model._runner.model.config, num_blocks=1, num_host_blocks=0, block_size=16)
    assert ModelExecutor(model._runner.model, cache, shape).calibrate().base_ns > 0


def test_single_tokens_come_first_the_longest_contexts_before_shorter_ones_and_chunks_behind_them() -> None:
    rows = [row(str(i), [1], length - 1, range(64)) for i, length in enumerate((16, 600, 32, 610))]
    rows.append(row("chunk", [1, 2, 3], 0, [0]))
    order = arranged(rows)
    assert order == [3, 1, 2, 0, 4]
    layout = layout_of([rows[index] for index in order], 16)
    assert layout.num_single == 4
    assert layout.positions().tolist() == [609, 599, 31, 15, 0, 1, 2]
