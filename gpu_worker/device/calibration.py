"""Cost constants of a device from a few timed steps at start. Knows plans and clocks; refuses to know models."""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.executor import ExecutorShape
from scheduler_engine.cost import CostConstants
from scheduler_engine.plan import ScheduledRow, StepPlan, StepResult
from scheduler_engine.request import RequestId

SHORT_CHUNK, LONG_CHUNK = 16, 96
FEW_ROWS, MANY_ROWS = 2, 8
SHORT_CONTEXT, LONG_CONTEXT = 16, 320
REPETITIONS = 2
WARM_CHUNK, WARM_ROWS, WARM_CONTEXT = 1_024, 64, 2_048

Execute = Callable[[StepPlan], StepResult]


def measure(
    execute: Execute, copy_blocks: Callable[[int], None], shape: ExecutorShape, clock_ns: Callable[[], int]
) -> CostConstants:
    """Differences of two sizes give each slope, the smallest step the rest; the engine's online fit corrects it later.

    On a shared machine a step may be slow by chance, so each size counts with the best of its repetitions.
    ``prefill_context_ns`` stays 0: the online fit finds it where contexts are long enough to matter.
    """
    timer = _Timer(execute, shape, clock_ns)
    timer.chunk(SHORT_CHUNK)  # the first step of a process pays for its memory
    short, long = timer.chunk(SHORT_CHUNK), timer.chunk(LONG_CHUNK)
    few, many = timer.rows(FEW_ROWS, SHORT_CONTEXT), timer.rows(MANY_ROWS, SHORT_CONTEXT)
    far = timer.rows(MANY_ROWS, LONG_CONTEXT)
    token_ns = max(1, (long - short) // (timer.chunk_size(LONG_CHUNK) - timer.chunk_size(SHORT_CHUNK) or 1))
    row_ns = max(1, (many - few) // (MANY_ROWS - FEW_ROWS))
    num_tokens = MANY_ROWS * (timer.context(MANY_ROWS, LONG_CONTEXT) - timer.context(MANY_ROWS, SHORT_CONTEXT))
    kv_token_ns = max(1, (far - many) // max(1, num_tokens))
    num_blocks = min(8, shape.num_blocks, shape.num_host_blocks)
    copy_ns = _best(lambda: copy_blocks(num_blocks), clock_ns) // num_blocks if num_blocks else 0
    return CostConstants(
        base_ns=max(1, min(few - FEW_ROWS * row_ns, short - SHORT_CHUNK * token_ns)),
        prefill_token_ns=token_ns,
        prefill_context_ns=0,
        decode_row_ns=row_ns,
        kv_token_ns=kv_token_ns,
        copy_operation_us=1,
        copy_bytes_per_us=max(1, shape.bytes_per_block * 1_000 // max(1, copy_ns)),
    )


def warm_up(execute: Execute, shape: ExecutorShape) -> None:
    """Steps like those that will come, so that kernels which try their variants at a first call try them on these."""
    timer = _Timer(execute, shape, lambda: 0)
    timer.chunk(WARM_CHUNK)
    timer.rows(WARM_ROWS, WARM_CONTEXT)


class _Timer:
    """Times made-up steps. Always: they fit the pool and the model's context."""

    def __init__(self, execute: Execute, shape: ExecutorShape, clock_ns: Callable[[], int]) -> None:
        self._execute = execute
        self._shape = shape
        self._clock_ns = clock_ns

    def chunk_size(self, num_tokens: int) -> int:
        return max(1, min(num_tokens, self._shape.num_blocks * self._shape.block_size, self._shape.max_model_len))

    def context(self, num_rows: int, wanted: int) -> int:
        """Tokens a row attends to: what its share of the pool holds, at most ``wanted``."""
        share = max(1, self._shape.num_blocks // num_rows) * self._shape.block_size
        return max(1, min(wanted, share, self._shape.max_model_len))

    def chunk(self, num_tokens: int) -> int:
        """Nanoseconds of one prefill."""
        size = self.chunk_size(num_tokens)
        table = range(-(-size // self._shape.block_size))
        return self._step([ScheduledRow(RequestId("calibration"), [0] * size, 0, table, True, (), None)])

    def rows(self, num_rows: int, wanted: int) -> int:
        """Nanoseconds of one decode step."""
        context = self.context(num_rows, wanted)
        blocks = -(-context // self._shape.block_size)
        return self._step(
            [
                ScheduledRow(
                    RequestId(f"calibration {row}"), [0], context - 1, self._table(row, blocks), True, (), None
                )
                for row in range(num_rows)
            ]
        )

    def _table(self, row: int, blocks: int) -> list[int]:
        return [(row * blocks + index) % self._shape.num_blocks for index in range(blocks)]

    def _step(self, rows: list[ScheduledRow]) -> int:
        plan = StepPlan(step=0, chunks=tuple(rows), swap_out=(), swap_in=(), token_budget=0, wake_at_us=None)
        return _best(lambda: self._execute(plan), self._clock_ns)


def _best(action: Callable[[], object], clock_ns: Callable[[], int]) -> int:
    durations = []
    for _ in range(REPETITIONS):
        started = clock_ns()
        action()
        durations.append(clock_ns() - started)
    return min(durations)
