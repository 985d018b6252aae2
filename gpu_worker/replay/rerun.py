"""A recorded log told again to the same engine, step by step, and the first step in which it decided otherwise.

Knows entries and the engine's verbs; refuses to judge what was decided.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from gpu_worker.replay import checkpoint
from gpu_worker.replay.checkpoint import CheckpointError
from gpu_worker.replay.prefix_names import names_of
from gpu_worker.replay.record_log import (
    LINK_BYTES,
    Boot,
    Cancelled,
    Closed,
    Drained,
    Entry,
    Input,
    LogError,
    LogFile,
    Named,
    Policy,
    ServedElsewhere,
    Stepped,
    Submitted,
)
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.errors import EngineError, PolicyError
from scheduler_engine.events import StepEvents
from scheduler_engine.plan import DecodeColumns, RowFailure, StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, snapshot_from_dict
from scheduler_engine.quiet import QuietSteps
from scheduler_engine.record import DecisionRecord, unpack_all
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler

Progress = Callable[[int, int], None]  # bytes read, bytes in all

NONSENSE = (
    ArithmeticError,
    AttributeError,
    EngineError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    struct.error,
)  # of a log with right checksums


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that is not as it was recorded. A record is None where the other side has one more."""

    step: int
    reason: str
    recorded: DecisionRecord | None
    found: DecisionRecord | None

    def __str__(self) -> str:
        if self.recorded is None and self.found is None:
            return f"step {self.step}: {self.reason}"
        return f"step {self.step}: {self.reason}\n  recorded: {self.recorded}\n  replayed: {self.found}"


class Diverged(Exception):
    """The engine decided otherwise than it is recorded to have."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference

    def __reduce__(self) -> tuple[type[Diverged], tuple[Difference]]:
        return Diverged, (self.difference,)


class Listener:
    """What somebody may want to see of a rerun. Does nothing; override what is of interest."""

    def told(self, entry: Entry, engine: Scheduler) -> None:
        """An input or a Boot, before it is told to the engine."""

    def planned(self, plan: StepPlan, entry: Stepped) -> None:
        """Before the result is applied: rows are live views. Of a step in which something may be decided."""

    def applied(self, plan: StepPlan, events: StepEvents, entry: Stepped, engine: Scheduler) -> None:
        """After it."""

    def decoded(self, decodes: DecodeColumns, entries: Sequence[Stepped]) -> None:
        """After steps in which these rows, as they were before the first one, each got one more token, and no more."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole log told again without a difference."""

    num_steps: int
    digest: str
    engine: Scheduler
    is_cut: bool  # the log ends in the middle of a frame, or without a Closed: its process died


def entries_of(files: Sequence[LogFile], progress: Progress | None = None) -> Iterator[Entry]:
    """Of all files, in order."""
    total, before = sum(file.num_bytes for file in files), 0
    for file in files:
        for offset, entries in file.frames():
            yield from entries
            if progress is not None:
                progress(before + offset, total)
        before += file.num_bytes


def replay(files: Sequence[LogFile], listener: Listener | None = None, progress: Progress | None = None) -> Replayed:
    """Tell an engine all that is recorded. Raises Diverged at the first difference, LogError for a bad log."""
    listener = listener or Listener()
    entries = entries_of(files, progress)
    boot = next(entries, None)
    if not isinstance(boot, Boot):
        raise LogError(f"{files[0].path} does not begin with what the engine was made of")
    engine = engine_of(boot, files[0])
    listener.told(boot, engine)
    steps = _Steps(engine, listener, boot.step)
    is_closed = False
    for entry in entries:
        if isinstance(entry, Stepped):
            is_closed = False
            steps.tell(entry)
            continue
        num_steps = steps.close()
        if isinstance(entry, Boot | Closed):
            check_next(Replayed(num_steps, engine.digest, engine, not is_closed), entry, files[0])
            is_closed = isinstance(entry, Closed)
        else:
            listener.told(entry, engine)
            tell(engine, entry)
    return Replayed(steps.close(), engine.digest, engine, files[-1].is_cut or not is_closed)


def check_next(replayed: Replayed, entry: Boot | Closed, file: LogFile) -> None:
    """Of what follows what was replayed. ``file``: with which that began. Raises LogError and Diverged."""
    if isinstance(entry, Boot) and replayed.is_cut:
        raise LogError(f"{file.path} or what follows it begins anew before it was closed")
    counted = entry.num_steps if isinstance(entry, Closed) else entry.step
    if counted != replayed.num_steps:
        raise LogError(f"{file.path} and what follows it hold {replayed.num_steps} steps, and count {counted}")
    if entry.digest != replayed.digest:
        raise Diverged(Difference(replayed.num_steps, "the digest after the last step is another", None, None))


def engine_of(boot: Boot, file: LogFile) -> Scheduler:
    """The engine as it was when the file began. Raises LogError."""
    try:
        if boot.checkpoint is None:
            return Scheduler(EngineConfig(**boot.config), policy_of(boot.policy), CostConstants(**boot.cost))
        if boot.engine != checkpoint.fingerprint():
            raise LogError(
                f"{file.path} begins in the middle of the work of engine {boot.engine}, and this is engine "
                f"{checkpoint.fingerprint()}: only the same source can take its state up"
            )
        return checkpoint.load(boot.checkpoint)
    except (TypeError, EngineError) as error:
        raise LogError(f"{file.path} describes an engine that this program cannot make: {error}") from error
    except CheckpointError as error:
        raise LogError(f"{file.path}: the state at its head is no engine's: {error}") from error


def policy_of(document: dict[str, Any]) -> PolicySnapshot:
    """Raises LogError for a policy with fields that this engine does not know."""
    try:
        return snapshot_from_dict(document)
    except PolicyError as error:
        raise LogError(f"a recorded policy does not fit this engine: {error}") from error


def request_of(entry: Submitted) -> Request:
    """With made-up token ids. Raises LogError."""
    fields = dict(entry.fields)
    fields["priority_class"] = PriorityClass(fields["priority_class"])
    try:
        return Request(
            **fields,
            prompt_token_ids=range(entry.num_prompt_tokens),
            delivered_token_ids=(0,) * entry.num_delivered_tokens,
            prefix_keys=tuple(names_of(entry.prefix_runs)),
        )
    except TypeError as error:
        raise LogError(f"a recorded request does not fit this engine: {error}") from error


def tell(engine: Scheduler, entry: Input) -> None:
    """One input."""
    match entry:
        case Submitted():
            engine.submit(request_of(entry), entry.at_us)
        case Cancelled():
            engine.cancel(RequestId(entry.request_id), entry.reason, entry.at_us)
        case Named():
            engine.name_blocks(RequestId(entry.request_id), tuple(names_of(entry.prefix_runs)))
        case Policy():
            engine.set_policy(policy_of(entry.policy))
        case ServedElsewhere():
            engine.set_service_elsewhere(PriorityClass(entry.priority_class), entry.tenant_id, entry.gpu_us)
        case Drained():
            engine.drain()
        case _:
            assert_never(entry)


class _Steps:
    """Recorded steps, told to the engine one after the other: quiet ones in stretches."""

    def __init__(self, engine: Scheduler, listener: Listener, step: int) -> None:
        self._engine = engine
        self._listener = listener
        self._step = step
        self._quiet = QuietSteps(engine)
        self._decodes: DecodeColumns | None = None  # of the stretch under way
        self._stretch: list[Stepped] = []

    def tell(self, entry: Stepped) -> None:
        """Raises Diverged."""
        is_plain = not (entry.records or entry.stopped_rows or entry.failed_rows or entry.completed_copies)
        if is_plain and self._decodes is None:
            self._decodes = self._quiet.begin()
        if is_plain and self._decodes is not None and self._quiet.plan(entry.planned_us):
            self._quiet.apply(entry.duration_us, entry.applied_us)
            self._stretch.append(entry)
            self._check_plan(entry)
        else:
            self.close()
            self._decide(entry)
        self._step += 1

    def close(self) -> int:
        """The stretch under way is over; returns how many steps were told."""
        if self._decodes is not None and self._stretch:
            self._listener.decoded(self._decodes, self._stretch)
            self._stretch = []
        self._decodes = None
        return self._step

    def _decide(self, entry: Stepped) -> None:
        engine, step = self._engine, self._step
        plan = engine.plan_step(entry.planned_us)
        self._listener.planned(plan, entry)
        try:
            events = engine.apply_step(result_of(plan, entry), entry.applied_us)
        except (EngineError, IndexError) as error:
            reason = f"the recorded result does not fit the plan: {error}"
            raise Diverged(Difference(step, reason, *_first_different(entry.records, b""))) from error
        if engine.step_records != entry.records:
            pair = _first_different(entry.records, engine.step_records)
            raise Diverged(Difference(step, "a decision is another", *pair))
        self._check_plan(entry)
        self._listener.applied(plan, events, entry, engine)

    def _check_plan(self, entry: Stepped) -> None:
        if self._engine.digest_bytes[:LINK_BYTES] != entry.link:
            raise Diverged(Difference(self._step, "decisions are the same, and the plan is another", None, None))


def result_of(plan: StepPlan, entry: Stepped) -> StepResult:
    """The recorded result, with a made-up token for each row that drew one. Raises IndexError for rows that are not."""
    row_ids = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]
    sampled = [0] * len(plan.decodes) + [0 if chunk.samples else -1 for chunk in plan.chunks]
    for index, _, _ in entry.failed_rows:
        sampled[index] = -1
    return StepResult(
        step=plan.step,
        duration_us=entry.duration_us,
        sampled_token_ids=sampled,
        stopped=frozenset(row_ids[index] for index in entry.stopped_rows),
        failed=tuple(RowFailure(row_ids[index], why, poison) for index, why, poison in entry.failed_rows),
        completed_copies=tuple(RequestId(name) for name in entry.completed_copies),
    )


def _first_different(recorded: bytes, found: bytes) -> tuple[DecisionRecord | None, DecisionRecord | None]:
    left: list[DecisionRecord | None] = [*unpack_all(recorded), None]
    right: list[DecisionRecord | None] = [*unpack_all(found), None]
    for index in range(max(len(left), len(right))):
        one = left[index] if index < len(left) else None
        other = right[index] if index < len(right) else None
        if one != other:
            return one, other
    return None, None
