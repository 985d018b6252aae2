"""Each Triton kernel beside its reference on odd sizes. Runs on a device, or on a CPU through Triton's interpreter.

Made of ``checking``'s parts, so that a bare GPU box can run it: ``benchmarks.gpu`` does before it times anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.kernels import block_copy, paged_decode, paged_prefill, reference, rms_norm, rotary_write, swiglu
from gpu_worker.kernels.checking import (
    LLAMA,
    ODD,
    QWEN,
    SMOL,
    Check,
    Guarded,
    Paged,
    Shape,
    among_nan,
    must_be_close,
)


def decode(shape: Shape, splits: int) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        paged = Paged(shape, device, dtype)
        num_heads, _, head_dim = shape.heads
        fused = paged.random(len(shape.contexts), num_heads + 2, head_dim)  # queries are a slice: strides count
        queries, out = fused[:, 1:-1], Guarded(*fused[:, 1:-1].shape, device=device, dtype=dtype)
        paged_decode.attend_decode(queries, paged.layer, paged.tables, paged.contexts, out.inner, splits=splits)
        expected = torch.empty_like(out.inner)
        reference.attend_decode(queries, paged.layer, paged.tables, paged.contexts, expected)
        out.must_be(expected)

    return check


def prefill(shape: Shape, tile: int) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        paged = Paged(shape, device, dtype)
        num_heads, num_kv_heads, head_dim = shape.heads
        firsts = torch.tensor([0, *shape.new]).cumsum(0).to(device, torch.int32)
        queries = paged.random(sum(shape.new), num_heads, head_dim)
        out = Guarded(*queries.shape, device=device, dtype=dtype)
        tiles = paged_prefill.tiles_of(shape.new, num_heads // num_kv_heads, device, tile)
        where = (paged.layer, paged.tables, paged.contexts, firsts)
        paged_prefill.attend_prefill(queries, *where, out.inner, tiles=tiles, tile=tile)
        expected = torch.empty_like(out.inner)
        reference.attend_prefill(queries, *where, expected)
        out.must_be(expected)

    return check


def rotate(shape: Shape, *, with_norms: bool, num_tokens: int = 3) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        paged = Paged(shape, device, dtype)
        num_heads, num_kv_heads, head_dim = shape.heads
        slots = [2 * shape.block_size + 1, -1, 0][:num_tokens]
        fused = paged.random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        angles = torch.rand(num_tokens, head_dim // 2) * 7
        turns = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
        norms = (paged.random(head_dim), paged.random(head_dim), 1e-5) if with_norms else None
        places, out = (
            torch.tensor(slots, device=device),
            Guarded(num_tokens, *shape.heads[::2], device=device, dtype=dtype),
        )
        expected_pool, expected = paged.pool.clone(), torch.empty_like(out.inner)
        reference.rotate_and_write(fused, places, turns, expected_pool[:, 1], expected, norms)
        rotary_write.rotate_and_write(fused, places, turns, paged.layer, out.inner, norms)
        out.must_be(expected)
        must_be_close(paged.pool, expected_pool)

    return check


def norm(num_rows: int, size: int, *, with_residual: bool) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(size)
        rows, weight, residual = (
            torch.randn(*shape, generator=random).to(device, dtype)
            for shape in ((num_rows, size), (size,), (num_rows, size))
        )
        rows, weight = among_nan(rows), among_nan(weight[None])[0]
        kept, out = (
            Guarded(num_rows, size, device=device, dtype=dtype),
            Guarded(num_rows, size, device=device, dtype=dtype),
        )
        kept.inner.copy_(residual)
        expected = torch.empty_like(rows)
        reference.rms_norm(rows, weight, 1e-5, expected, residual if with_residual else None)
        rms_norm.rms_norm(rows, weight, 1e-5, out.inner, kept.inner if with_residual else None)
        out.must_be(expected)
        kept.must_be(residual)

    return check


def gated(num_rows: int, size: int) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        gate_up = torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(size)).to(device, dtype) * 3
        gate_up = among_nan(gate_up)
        out, expected = Guarded(num_rows, size, device=device, dtype=dtype), gate_up.new_empty(num_rows, size)
        reference.swiglu(gate_up, expected)
        swiglu.swiglu(gate_up, out.inner)
        out.must_be(expected)

    return check


def copied(num_blocks: int, size: int) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        pool = torch.randn(num_blocks + 4, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
        blocks = torch.randperm(num_blocks + 4)[:num_blocks].to(device, torch.int32)
        unnamed = torch.ones(num_blocks + 4, dtype=torch.bool, device=device)
        unnamed[blocks.long()] = False
        pool[unnamed] = torch.nan
        out = Guarded(num_blocks, size, device=device, dtype=dtype)
        block_copy.gather_blocks(pool, blocks, out.inner)
        out.must_be(pool[blocks.long()])
        back = Guarded(num_blocks + 4, size, device=device, dtype=dtype)
        block_copy.scatter_blocks(back.inner, blocks, out.inner)
        expected = torch.full_like(pool, torch.nan)
        reference.scatter_blocks(expected, blocks, out.inner)
        back.must_be(expected)

    return check


def cases() -> Sequence[tuple[str, Check]]:
    """Name and check of each; a check raises KernelMismatch."""
    decodes = [
        (Shape(SMOL, 16, (1, 15, 16, 17, 70)), 1),
        (Shape(SMOL, 16, (1, 33, 0, 150)), 4),
        (Shape(LLAMA, 16, (129, 64)), 2),
        (Shape(QWEN, 4, (3, 9, 31)), 2),
        (Shape(ODD, 7, (40, 2)), 8),
        (Shape(ODD, 7, (64, 128, 0)), 1),  # whole turns of the loop, and a padded row
    ]
    prefills = [
        (Shape(SMOL, 16, (23, 70, 1), (23, 9, 1)), 32),
        (Shape(LLAMA, 16, (80,), (17,)), 16),
        (Shape(QWEN, 4, (66, 12), (66, 5)), 16),
        (Shape(ODD, 7, (30, 8), (4, 8)), 16),
        (Shape(ODD, 7, (3, 65), (3, 1)), 16),  # less than a group of queries, and one that sees a whole turn and more
    ]
    found: list[tuple[str, Check]] = []
    found += [(f"decode {shape.name}, {splits} parts", decode(shape, splits)) for shape, splits in decodes]
    found += [(f"prefill {shape.name}, tiles of {tile}", prefill(shape, tile)) for shape, tile in prefills]
    for heads in (SMOL, LLAMA, QWEN, ODD):
        shape = Shape(heads, 7 if heads == ODD else 16, (30, 3))
        found += [(f"rotate {shape.name}, norms {n}", rotate(shape, with_norms=n)) for n in (False, True)]
    found.append(("rotate one token", rotate(Shape(ODD, 7, (3,)), with_norms=True, num_tokens=1)))
    for size in (1, 20, 576, 1_025):
        found += [(f"norm of {size}, residual {r}", norm(5, size, with_residual=r)) for r in (False, True)]
    found += [(f"swiglu of {size}", gated(3, size)) for size in (1, 20, 1_025, 1_536)]
    found += [(f"copy of {n} blocks of {size}", copied(n, size)) for n, size in ((1, 30), (5, 4_100))]
    return found
