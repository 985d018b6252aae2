"""A CPU's compiled decode attention: as its reference has it, the same alone, in a batch and on several threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch

from gpu_worker.kernels import cpu_self_test, in_place
from gpu_worker.kernels.checking import ODD, SMOL, Check, KernelMismatch, Paged, Shape
from gpu_worker.kernels.cpu import CpuKernels
from gpu_worker.kernels.layout import Layout, PoolShape

pytest.importorskip("numba", reason="the extra cpu is not installed")
ATTEND = in_place.decode_attention()
assert isinstance(ATTEND, in_place.InPlace)
CASES = cpu_self_test.cases(ATTEND)
CPU, FLOAT = torch.device("cpu"), torch.float32
MIXED = Shape(SMOL, 16, (530, 470, 129, 64, 17, 16, 3, 1))


def attended(paged: Paged, queries: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    assert ATTEND is not None
    out = torch.full(queries[rows].shape, torch.nan)
    ATTEND(queries[rows], paged.pool, 1, paged.tables[rows].numpy(), paged.contexts[rows].numpy(), out)
    return out


@pytest.fixture
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(in_place, "FLOATS_PER_THREAD", 1)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("check", [check for _, check in CASES], ids=[name for name, _ in CASES])
def test_it_gives_what_its_reference_gives(check: Check) -> None:
    check(CPU, FLOAT)


def test_the_checks_see_a_kernel_that_forgets_to_scale() -> None:
    def wrong(queries: torch.Tensor, *others: object) -> None:
        assert ATTEND is not None
        ATTEND(queries * 2, *others)  # type: ignore[arg-type]

    with pytest.raises(KernelMismatch, match="apart by"):
        cpu_self_test.decode(wrong, Shape(ODD, 7, (40, 2)))(CPU, FLOAT)


def test_a_row_gets_the_same_bits_alone_and_in_a_batch() -> None:
    paged = Paged(MIXED, CPU, FLOAT)
    queries = paged.random(len(MIXED.contexts), 9, 64)
    together = attended(paged, queries)
    for row in range(len(MIXED.contexts)):
        assert torch.equal(attended(paged, queries, slice(row, row + 1))[0], together[row])


@pytest.mark.usefixtures("_small_shares")
@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_threads_share_rows_and_heads_and_change_no_bit(num_threads: int) -> None:
    paged = Paged(MIXED, CPU, FLOAT)
    queries = paged.random(len(MIXED.contexts), 9, 64)
    torch.set_num_threads(1)
    expected = attended(paged, queries)
    torch.set_num_threads(num_threads)
    assert torch.equal(attended(paged, queries), expected)
    assert torch.equal(attended(paged, queries, slice(1)), expected[:1])


def test_shares_are_about_equal_and_leave_nothing_out() -> None:
    contexts = numpy.array([900, 100, 100, 100], numpy.int32)
    for num_threads in range(1, 8):
        shares = in_place.shares(contexts, 3, num_threads)
        assert [first for first, _ in shares] == [0, *(last for _, last in shares[:-1])]
        assert (len(shares), shares[-1][1]) == (num_threads, 12)
    assert in_place.shares(contexts, 3, 2) == [(0, 2), (2, 12)]


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
def test_a_number_that_is_none_spoils_its_own_row_alone(spoilt: float) -> None:
    paged = Paged(Shape(SMOL, 16, (40, 35)), CPU, FLOAT)
    queries = paged.random(2, 9, 64)
    before = attended(paged, queries)
    paged.pool[paged.tables[0, 1], 1, 3] = spoilt
    after = attended(paged, queries)
    assert not after[0].isfinite().any()
    assert torch.equal(after[1], before[1])


def test_scores_far_apart_neither_overflow_nor_leave_a_trace_of_the_small_ones() -> None:
    shape = Shape((1, 1, 4), 4, (8,))
    paged = Paged(shape, CPU, FLOAT)
    paged.pool[paged.tables[0].long(), 1] = 0.0
    paged.pool[paged.tables[0, 0], 1, 2, 0] = 500.0  # a key of the first block; its score is 1,000 above the others
    paged.pool[paged.tables[0, 0], 1, 2, 1] = 3.0
    paged.pool[paged.tables[0, 1], 1, :, 1] = 1e30
    assert attended(paged, torch.ones(1, 1, 4)).tolist() == [[[3.0] * 4]]


def test_a_step_of_chunks_and_single_tokens_gives_what_copied_contexts_give() -> None:
    shape = PoolShape(num_layers=2, block_size=16, num_heads=9, num_kv_heads=3, head_dim=64)
    layout = Layout(
        tables=numpy.array([[0, 1, 2], [3, 3, 3], [4, 5, 4]], numpy.int32),
        contexts=numpy.array([40, 7, 20], numpy.int32),
        lengths=numpy.array([1, 1, 9], numpy.int32),
        block_size=16,
    )
    random = torch.Generator().manual_seed(0)
    pool, fused = torch.randn(6, *shape.of_block, generator=random), torch.randn(11, 15, 64, generator=random)
    found, expected = (
        kernels.attend(fused[:, :9], pool, 1, kernels.place(layout))
        for kernels in (CpuKernels(shape, ATTEND), CpuKernels(shape))
    )
    assert torch.allclose(found, expected, atol=2e-6)
    assert torch.equal(found[2:], expected[2:])


def test_where_nothing_can_be_kept_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CompileResultCacheImpl

    from gpu_worker.kernels.cpu_decode import compiled

    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])  # no folder can be written
    _, check = cpu_self_test.cases(in_place.InPlace(compiled()))[0]
    check(CPU, FLOAT)
