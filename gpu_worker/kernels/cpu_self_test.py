"""The compiled decode attention beside its reference, on the shapes that the Triton one is checked on, and on threads.

Runs where a worker runs (``--self-test``): machine code was made for that very processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.kernels import reference
from gpu_worker.kernels.checking import LLAMA, ODD, QWEN, SMOL, Check, Guarded, Paged, Shape
from gpu_worker.kernels.in_place import InPlace


def decode(attend: InPlace, shape: Shape) -> Check:
    def check(device: torch.device, dtype: torch.dtype) -> None:
        paged = Paged(shape, device, dtype)
        num_heads, _, head_dim = shape.heads
        fused = paged.random(len(shape.contexts), num_heads + 2, head_dim)  # queries are a slice: strides count
        queries, out = fused[:, 1:-1], Guarded(*fused[:, 1:-1].shape, device=device, dtype=dtype)
        attend(queries, paged.pool, 1, paged.tables.numpy(), paged.contexts.numpy(), out.inner)
        expected = torch.empty_like(out.inner)
        reference.attend_decode(queries, paged.layer, paged.tables, paged.contexts, expected)
        out.must_be(expected)

    return check


def cases(attend: InPlace) -> Sequence[tuple[str, Check]]:
    """Name and check of each, for a CPU in float32; a check raises KernelMismatch."""
    shapes = [
        Shape(SMOL, 16, (1, 15, 16, 17, 70)),
        Shape(SMOL, 16, (1, 33, 0, 150)),
        Shape(LLAMA, 16, (129, 64)),
        Shape(QWEN, 4, (3, 9, 31)),
        Shape(ODD, 7, (40, 2)),
        Shape(ODD, 7, (64, 128, 0)),
        Shape((2, 2, 1), 1, (5, 1)),
    ]
    return [(f"decode in place {shape.name}", decode(attend, shape)) for shape in shapes]
