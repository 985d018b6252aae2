"""What a kernel's checks are made of: paged contexts among NaN, guarded outputs, how close is close. Knows no kernel.

Inputs that must not be read and outputs before they are written are NaN, and a guard row lies before and after each
output. Knows no test runner, so that a bare machine can check its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Check = Callable[[torch.device, torch.dtype], None]
# Of the largest number: float32 sums in another order; for the others one rounding of the result, one of the softmax.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class KernelMismatch(AssertionError):
    """A kernel wrote something else than its reference, or where it must not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``heads`` [H, K, D]; ``block_size`` S; ``contexts``: tokens of each row, ``new``: how many of them are new."""

    heads: tuple[int, int, int]
    block_size: int
    contexts: tuple[int, ...]
    new: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return (
            f"{'x'.join(map(str, self.heads))}, blocks of {self.block_size}, contexts {self.contexts}, new {self.new}"
        )


class Guarded:
    """An output of NaN between two guard rows of NaN. ``inner`` is what a kernel may write, all of it."""

    def __init__(self, *shape: int, device: torch.device, dtype: torch.dtype) -> None:
        self._whole = torch.full((shape[0] + 2, *shape[1:]), torch.nan, device=device, dtype=dtype)
        self.inner = self._whole[1:-1]

    def must_be(self, expected: Tensor) -> None:
        """Raises KernelMismatch."""
        if not self._whole[[0, -1]].isnan().all():
            raise KernelMismatch("a guard row was written")
        must_be_close(self.inner, expected)


def must_be_close(found: Tensor, expected: Tensor) -> None:
    """Raises KernelMismatch; NaN must stand where NaN is expected."""
    if not torch.equal(found.isnan(), expected.isnan()):
        raise KernelMismatch(f"{int((found.isnan() != expected.isnan()).sum())} numbers are NaN or not NaN wrongly")
    exact, wanted = found.double().nan_to_num(), expected.double().nan_to_num()
    apart, largest = float((exact - wanted).abs().max()), float(wanted.abs().max())
    if apart > TOLERANCE[found.dtype] * max(largest, 1e-3):
        raise KernelMismatch(f"apart by {apart:.3g} where the largest number is {largest:.3g}")


def among_nan(rows: Tensor) -> Tensor:
    """The same numbers as a slice whose neighbours, in every direction, are NaN: what is read beyond it shows."""
    around = torch.full((rows.shape[0] + 2, *rows.shape[1:-1], rows.shape[-1] + 2), torch.nan, dtype=rows.dtype)
    inner = around.to(rows.device)[1:-1, ..., 1:-1]
    return inner.copy_(rows)


class Paged:
    """Rows of a shape in a pool of two layers, of which layer 1 holds their contexts and all else is NaN."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._random = torch.Generator().manual_seed(seed)
        _, num_kv_heads, head_dim = shape.heads
        used = [-(-context // shape.block_size) for context in shape.contexts]
        order = torch.randperm(sum(used) + 3, generator=self._random).tolist()
        tables = torch.full((len(used), max(1, *used)), 2**30, dtype=torch.int32)  # far outside: must not be followed
        pool = torch.full((len(order), 2, shape.block_size, 2, num_kv_heads, head_dim), torch.nan)
        for row, context in enumerate(shape.contexts):
            tables[row, : used[row]] = torch.tensor([order.pop() for _ in range(used[row])], dtype=torch.int32)
            for position in range(context):
                block, slot = tables[row, position // shape.block_size], position % shape.block_size
                pool[block, 1, slot] = torch.randn(2, num_kv_heads, head_dim, generator=self._random)
        self.pool = pool.to(device, dtype)
        self.layer = self.pool[:, 1]
        self.tables = tables.to(device)
        self.contexts = torch.tensor(shape.contexts, dtype=torch.int32, device=device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.device, self.dtype)


SMOL, LLAMA, QWEN, ODD = (9, 3, 64), (8, 2, 128), (4, 4, 32), (5, 1, 20)
