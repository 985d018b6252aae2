"""Every Triton kernel beside its reference: odd sizes, poisoned outputs, guard rows. Interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.kernels.checking import Check, Guarded, KernelMismatch, Paged, Shape, among_nan, must_be_close
from gpu_worker.kernels.self_test import cases

CASES = cases()
NAMES = [name for name, _ in CASES]
# The interpreter multiplies bfloat16 matrices as if they were integers, so half precision is float16 there.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.mark.parametrize("check", [check for _, check in CASES], ids=NAMES)
def test_a_kernel_gives_what_its_reference_gives(device: torch.device, check: Check) -> None:
    check(device, torch.float32)


KINDS = {name.partition(" ")[0]: (name, check) for name, check in reversed(CASES)}  # of each kernel its first case


@pytest.mark.parametrize(("name", "check"), [*KINDS.values(), *CASES[4:20:4]], ids=[*KINDS, *NAMES[4:20:4]])
def test_in_half_precision_it_differs_by_rounding_only(device: torch.device, name: str, check: Check) -> None:
    check(device, HALF)


def test_the_checks_see_a_wrong_number_a_missing_one_and_a_write_beyond_the_output() -> None:
    found = Guarded(2, 3, device=torch.device("cpu"), dtype=torch.float32)
    found.inner.fill_(1.0)
    found.must_be(torch.ones(2, 3))
    with pytest.raises(KernelMismatch, match=r"apart by 1"):
        must_be_close(found.inner, torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]]))
    found.inner[1, 2] = torch.nan
    with pytest.raises(KernelMismatch, match="1 numbers are NaN"):
        found.must_be(torch.ones(2, 3))
    found._whole.fill_(1.0)
    with pytest.raises(KernelMismatch, match="guard row"):
        found.must_be(torch.ones(2, 3))


def test_every_kernel_has_its_cases() -> None:
    """One file each; ``copy`` is gather and scatter."""
    assert set(KINDS) == {"decode", "prefill", "rotate", "norm", "swiglu", "copy"}


def test_inputs_lie_among_numbers_that_are_none() -> None:
    found = among_nan(torch.ones(2, 3))
    assert found.isfinite().all()
    around = torch.as_strided(found, (2, 1), found.stride(), found.storage_offset() + 3)
    assert around.isnan().all()


def test_a_case_reads_nothing_but_its_rows_contexts() -> None:
    paged = Paged(Shape((2, 1, 4), 4, (5, 3)), torch.device("cpu"), torch.float32)
    finite = paged.pool.isfinite()
    assert int(finite.sum()) == (5 + 3) * 2 * 4
    assert not finite[:, 0].any()
