"""Each Triton kernel against its floor and against torch, on the shapes of Llama-3-8B. Knows tensors, no requests.

Without a GPU the kernels run through Triton's interpreter, whose times mean nothing: then only their results are
checked, and the answer says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.device import Ceilings, Machine, ceilings
from benchmarks.figures import report, say
from gpu_worker.kernels import self_test
from gpu_worker.kernels.checking import KernelMismatch
from gpu_worker.kernels.compiled import Place, TritonKernels, forget_tuning
from gpu_worker.kernels.layout import BLOCK_SIZE, PoolShape
from gpu_worker.kernels.paged_decode import attend_decode
from gpu_worker.kernels.paged_prefill import attend_prefill, tiles_of

LLAMA_8B = PoolShape(num_layers=1, block_size=BLOCK_SIZE, num_heads=32, num_kv_heads=8, head_dim=128)
TINY = PoolShape(num_layers=1, block_size=BLOCK_SIZE, num_heads=4, num_kv_heads=2, head_dim=16)
HIDDEN, WIDE = 4_096, 14_336


@dataclass(frozen=True, slots=True)
class Sizes:
    """``decodes``: (rows, context). ``prefills``: (new tokens, past); the first of each is what kernels are tuned on.

    ``tokens``: of the kernels without a context.
    """

    decodes: Sequence[tuple[int, int]] = ((64, 2_048), (1, 8_192), (16, 2_048), (256, 1_024), (64, 8_192))
    prefills: Sequence[tuple[int, int]] = ((2_048, 0), (512, 0), (2_048, 8_192))
    tokens: Sequence[int] = (64, 2_048)
    blocks: int = 512
    hidden: int = HIDDEN
    wide: int = WIDE


REHEARSAL = Sizes(decodes=((2, 20),), prefills=((5, 3),), tokens=(3,), blocks=2, hidden=48, wide=40)


@dataclass(frozen=True, slots=True)
class Measured:
    """``rival_s``: torch's own way to the same result, on dense tensors where it knows no paged ones."""

    name: str
    kernel_s: float
    floor_s: float
    rival_s: float | None

    def figures(self) -> dict[str, Any]:
        return {
            "us": round(self.kernel_s * 1e6, 1),
            "floor_us": round(self.floor_s * 1e6, 1),
            "floor_over_us": round(self.floor_s / self.kernel_s, 3),
            "torch_us": None if self.rival_s is None else round(self.rival_s * 1e6, 1),
        }


class Cases:
    """Always: a case's bytes and operations are those that its kernel's docstring counts."""

    def __init__(self, machine: Machine, limits: Ceilings, sizes: Sizes, shape: PoolShape) -> None:
        self._machine, self._limits, self._sizes, self._shape = machine, limits, sizes, shape
        self._kernels = TritonKernels(shape, machine.device)
        self._element = machine.dtype.itemsize

    def all(self) -> Iterator[Measured]:
        for rows, context in self._sizes.decodes:
            yield self.decode(rows, context)
        for new, past in self._sizes.prefills:
            yield self.prefill(new, past)
        for tokens in self._sizes.tokens:
            yield self.norm(tokens)
            yield self.gated(tokens)
            yield self.rotated(tokens)
        yield self.copied(self._sizes.blocks)

    def _measured(
        self,
        name: str,
        kernel: Callable[[], object],
        rival: Callable[[], object] | None,
        num_bytes: float,
        ops: float = 0,
    ) -> Measured:
        found = self._machine.seconds(kernel)
        return Measured(
            name, found, self._limits.floor_s(num_bytes, ops), None if rival is None else self._machine.seconds(rival)
        )

    def _context(self, rows: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """A pool in which each row's blocks are scattered, its layer, and the tables."""
        blocks = -(-context // BLOCK_SIZE)
        pool = self._machine.random(rows * blocks, *self._shape.of_block)
        tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks)
        return pool, pool[:, 0], tables.to(self._machine.device)

    def _dense(self, layer: Tensor, tables: Tensor, context: int) -> tuple[Tensor, Tensor]:
        dense = layer[tables.long()].flatten(1, 2)[:, :context]  # [R, context, 2, K, D]
        keys, values = dense.permute(2, 0, 3, 1, 4).contiguous()
        return keys, values

    def decode(self, rows: int, context: int) -> Measured:
        heads, kv_heads, dim = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        _, layer, tables = self._context(rows, context)
        queries, contexts = self._machine.random(rows, heads, dim), torch.full((rows,), context, dtype=torch.int32)
        contexts, out = contexts.to(self._machine.device), torch.empty_like(queries)
        keys, values = self._dense(layer, tables, context)
        return self._measured(
            f"decode {rows} x {context}",
            lambda: attend_decode(queries, layer, tables, contexts, out),
            lambda: functional.scaled_dot_product_attention(queries[:, :, None], keys, values, enable_gqa=True),
            rows * (2 * context * kv_heads + 2 * heads) * dim * self._element,
            4 * rows * context * heads * dim,
        )

    def prefill(self, new: int, past: int) -> Measured:
        heads, kv_heads, dim = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        context = past + new
        _, layer, tables = self._context(1, context)
        queries = self._machine.random(new, heads, dim)
        out, tiles = torch.empty_like(queries), tiles_of([new], self._shape.group, self._machine.device)
        contexts = torch.tensor([context], dtype=torch.int32, device=self._machine.device)
        firsts = torch.tensor([0, new], dtype=torch.int32, device=self._machine.device)
        keys, values = self._dense(layer, tables, context)
        side = queries.transpose(0, 1)[None]
        seen = torch.ones(new, context, dtype=torch.bool, device=self._machine.device).tril(past)
        mask = None if past == 0 else seen
        pairs = new * past + new * (new + 1) / 2
        return self._measured(
            f"prefill {new} after {past}",
            lambda: attend_prefill(queries, layer, tables, contexts, firsts, out, tiles=tiles),
            lambda: functional.scaled_dot_product_attention(
                side, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            ),
            (2 * context * kv_heads + 2 * new * heads) * dim * self._element,
            4 * pairs * heads * dim,
        )

    def norm(self, tokens: int) -> Measured:
        size = self._sizes.hidden
        rows, residual, weight = (self._machine.random(*s) for s in ((tokens, size), (tokens, size), (size,)))
        return self._measured(
            f"add and norm {tokens}",
            lambda: self._kernels.add_and_norm(residual, rows, weight, 1e-5),
            lambda: functional.rms_norm(residual.add_(rows), (size,), weight, 1e-5),
            4 * tokens * size * self._element,
        )

    def gated(self, tokens: int) -> Measured:
        gate_up = self._machine.random(tokens, 2 * self._sizes.wide)
        gate, up = gate_up.chunk(2, dim=1)
        return self._measured(
            f"swiglu {tokens}",
            lambda: self._kernels.swiglu(gate_up),
            lambda: functional.silu(gate) * up,
            3 * tokens * self._sizes.wide * self._element,
        )

    def rotated(self, tokens: int) -> Measured:
        shape, device = self._shape, self._machine.device
        pool, _, tables = self._context(1, tokens)
        slots = (tables[0].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:tokens]
        fused = self._machine.random(tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        turns = torch.rand(tokens, 2, shape.head_dim // 2, device=device)
        place = Place(slots, slots, slots, num_single=0)  # only its slots are read
        return self._measured(
            f"rotate and write {tokens}",
            lambda: self._kernels.rotate_and_write(fused, turns, pool, 0, place, None),
            None,
            2 * fused.numel() * self._element + 4 * turns.numel(),
        )

    def copied(self, blocks: int) -> Measured:
        """Blocks of all of the model's layers, as a swap gathers them."""
        whole = self._machine.random(blocks + 7, 32 if self._machine.is_gpu else 1, *self._shape.of_block)
        wanted = torch.randperm(blocks + 7, dtype=torch.int32)[:blocks].to(self._machine.device)
        out, long = torch.empty_like(whole[:blocks]), wanted.long()
        return self._measured(
            f"gather {blocks} blocks",
            lambda: self._kernels.gather_blocks(whole, wanted, out),
            lambda: torch.index_select(whole, 0, long, out=out),
            2 * out.nbytes,
        )


def wrong_kernels(machine: Machine) -> list[str]:
    """Of all checks in all precisions of the device, those that fail, each with what it found."""
    dtypes = (torch.float32, torch.bfloat16) if machine.is_gpu else (torch.float32,)
    wrong = []
    for name, check in self_test.cases():
        for dtype in dtypes:
            try:
                check(machine.device, dtype)
            except KernelMismatch as error:
                wrong.append(f"{name}, {dtype}: {error}")
    forget_tuning()
    return wrong


def this_machine() -> Machine:
    """A GPU in bfloat16, or a CPU that stands in for one."""
    if torch.cuda.is_available():
        return Machine(torch.device("cuda"), torch.bfloat16)
    return Machine(torch.device("cpu"), torch.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: time it too, on tiny shapes")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    machine = this_machine()
    wrong = wrong_kernels(machine)
    result: dict[str, Any] = {"bench": "kernels", "checks": len(self_test.cases()), "wrong": wrong}
    if wrong:
        report(result, as_json=found.json)
        return 1
    if machine.is_gpu or found.rehearse:
        limits = ceilings(machine)
        sizes = Sizes() if machine.is_gpu else REHEARSAL
        shape = LLAMA_8B if machine.is_gpu else TINY
        result["copy_gb_per_s"] = round(limits.bytes_per_s / 1e9, 1)
        result["matmul_tflops"] = round(limits.operations_per_s / 1e12, 2)
        result["kernels"] = {one.name: one.figures() for one in Cases(machine, limits, sizes, shape).all()}
    if not machine.is_gpu:
        say("no GPU here: the kernels ran through Triton's interpreter, which shows that they are right, not how fast")
        result["times_mean_nothing"] = True
    report(result, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
