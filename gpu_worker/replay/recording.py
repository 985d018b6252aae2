"""An engine that writes down all it is told, so that the same engine can be told it again.

Knows the engine's verbs and what of their arguments decides; refuses to know files (``log_writer``). No token id is
written: lengths decide, which rows ended, and which prompts begin alike.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpu_worker.replay import checkpoint
from gpu_worker.replay.log_writer import LogWriter
from gpu_worker.replay.prefix_names import PrefixNames, runs_of
from gpu_worker.replay.record_log import (
    LINK_BYTES,
    Boot,
    Cancelled,
    Closed,
    Drained,
    Entry,
    Named,
    Policy,
    ServedElsewhere,
    Stepped,
    Submitted,
)
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.events import FinishReason, StepEvents
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, snapshot_to_dict
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler

FLUSH_US = 1_000_000
IDLE_FLUSH_US = 60_000_000  # steps in which nothing happens are no news
FLUSH_ENTRIES = 1_024
HOUR_S = 3_600
FILE_S = 120  # a replay begins where a file does
_NO_LIMIT = 1 << 50
FEW_LIVE = 250  # their state is taken down in less than a step
MOST_LIVE_AT_CHECKPOINT = 5_000  # more, and the pause for it would be felt: it waits for a calmer moment
_NOT_WRITTEN = frozenset({"prompt_token_ids", "delivered_token_ids", "stop_token_ids", "sampling", "prefix_keys"})
_WRITTEN = {field.name: field.default for field in fields(Request) if field.name not in _NOT_WRITTEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose log it is."""

    worker_id: str
    epoch: int
    model: str


class RecordingScheduler(Scheduler):
    """Always: decides as a Scheduler does; entries are handed over in the order of the calls, at the latest a second
    or 1,024 entries after them, and at once when the work ends.

    A new file begins each FILE_S while few requests are live, each hour otherwise, and when one has filled a quarter of
    the bound, with the engine's state at its head.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: PolicySnapshot,
        cost: CostConstants,
        *,
        origin: Origin,
        writer: LogWriter,
        most_file_bytes: int,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(config, policy, cost)
        self._recording = Recording(self, config, policy, cost, origin, writer, most_file_bytes, unix_s)

    def submit(self, request: Request, now_us: int) -> None:
        super().submit(self._recording.submitted(request, now_us), now_us)

    def cancel(self, request_id: RequestId, reason: str, now_us: int) -> None:
        self._recording.add(Cancelled(now_us, request_id, reason))
        super().cancel(request_id, reason, now_us)

    def name_blocks(self, request_id: RequestId, keys: Sequence[bytes]) -> None:
        super().name_blocks(request_id, self._recording.named(request_id, keys))

    def set_policy(self, policy: PolicySnapshot) -> None:
        self._recording.add(Policy(snapshot_to_dict(policy)))
        super().set_policy(policy)

    def set_service_elsewhere(self, priority_class: PriorityClass, tenant_id: str, gpu_us: int) -> None:
        self._recording.add(ServedElsewhere(priority_class, tenant_id, gpu_us))
        super().set_service_elsewhere(priority_class, tenant_id, gpu_us)

    def drain(self) -> None:
        self._recording.add(Drained())
        super().drain()

    def plan_step(self, now_us: int) -> StepPlan:
        plan = super().plan_step(now_us)
        self._recording.planned(plan, now_us)
        return plan

    def apply_step(self, result: StepResult, now_us: int) -> StepEvents:
        events = super().apply_step(result, now_us)
        self._recording.applied(result, events, now_us)
        return events

    def close(self) -> None:
        """Nothing follows: the last entries are handed over."""
        self._recording.close(is_end=True)


class Recording:
    """The entries of one engine, on their way to the writer."""

    def __init__(
        self,
        engine: Scheduler,
        config: EngineConfig,
        policy: PolicySnapshot,
        cost: CostConstants,
        origin: Origin,
        writer: LogWriter,
        most_file_bytes: int,
        unix_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._most_file_bytes = most_file_bytes
        self._unix_s = unix_s
        self._entries: list[Entry] = []
        self._flushed_us = 0
        self._has_news = self._was_busy = False  # since the last flush; in the last step
        self._prefixes = PrefixNames()
        self._plan: StepPlan | None = None
        self._planned_us = 0
        self._num_steps = 0
        self._made_of: dict[str, Any] = {
            "worker_id": origin.worker_id,
            "epoch": origin.epoch,
            "model": origin.model,
            "engine": checkpoint.fingerprint(),
            "config": asdict(config),
            "cost": asdict(cost),
            "policy": snapshot_to_dict(policy),
        }
        self._begin(None, 0)

    def _begin(self, state: bytes | None, now_us: int) -> None:
        started_s = self._began_s = self._unix_s()
        boot = Boot(
            started_unix_us=int(started_s * 1_000_000),
            now_us=now_us,
            step=self._num_steps,
            digest=self._engine.digest,
            checkpoint=state,
            **self._made_of,
        )
        self._writer.put(boot)

    def submitted(self, request: Request, now_us: int) -> Request:
        """The request as the engine shall see it, which is what a replay can show it again."""
        names = self._prefixes.of(request.prefix_keys) if request.prefix_keys else []
        self._entries.append(
            Submitted(
                now_us,
                _fields(request),
                len(request.prompt_token_ids),
                len(request.delivered_token_ids),
                runs_of(names),
            )
        )
        return replace(request, prefix_keys=tuple(names)) if names else request

    def named(self, request_id: RequestId, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """The keys as the engine shall see them."""
        names = tuple(self._prefixes.of(keys))
        self._entries.append(Named(request_id, runs_of(names)))
        return names

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def planned(self, plan: StepPlan, now_us: int) -> None:
        self._plan, self._planned_us = plan, now_us

    def applied(self, result: StepResult, events: StepEvents, now_us: int) -> None:
        plan = self._plan
        if plan is None:
            raise AssertionError("an engine applies only what it has planned")
        self._num_steps += 1
        self._entries.append(
            Stepped(
                self._planned_us,
                now_us,
                result.duration_us,
                self._engine.digest_bytes[:LINK_BYTES],
                self._engine.step_records,
                _stopped_rows(plan, events),
                _failed_rows(plan, result),
                tuple(result.completed_copies),
            )
        )
        is_busy = not plan.is_empty
        stays_idle = not is_busy and not self._was_busy  # the first idle step is an answer's: its sender is at work
        self._has_news, self._was_busy = self._has_news or is_busy, is_busy
        interval_us = FLUSH_US if self._has_news else IDLE_FLUSH_US
        is_due = now_us - self._flushed_us >= interval_us or len(self._entries) >= FLUSH_ENTRIES
        if self._prefixes.is_full:
            self._prefixes.prune(self._engine.prefix_keys_in_use())
        if is_due or (stays_idle and self._has_news):
            self._flush(now_us)
            if self._is_time_for_another_file():
                self.close(is_end=False)
                self._begin(checkpoint.save(self._engine, but=frozenset({"_recording"})), now_us)

    def _is_time_for_another_file(self) -> bool:
        num_bytes = self._writer.num_entry_bytes
        if num_bytes >= 2 * self._most_file_bytes:
            return True
        num_live = self._engine.num_live
        is_due = num_bytes >= self._most_file_bytes or self._has_passed(HOUR_S)
        return (is_due and num_live <= MOST_LIVE_AT_CHECKPOINT) or (num_live <= FEW_LIVE and self._has_passed(FILE_S))

    def _has_passed(self, period_s: int) -> bool:
        """A boundary of the period, since the file began."""
        return self._unix_s() // period_s != self._began_s // period_s

    def _flush(self, now_us: int) -> None:
        self._flushed_us, self._has_news = now_us, False
        if self._entries:
            self._writer.put(self._entries)
            self._entries = []

    def close(self, *, is_end: bool) -> None:
        self._entries.append(Closed(self._num_steps, self._engine.digest, is_end))
        self._flush(self._flushed_us)


def _fields(request: Request) -> dict[str, Any]:
    """Those that are not as by default."""
    values = {name: getattr(request, name) for name in _WRITTEN}
    return {name: value for name, value in values.items() if _WRITTEN[name] is MISSING or value != _WRITTEN[name]}


def _stopped_rows(plan: StepPlan, events: StepEvents) -> tuple[int, ...]:
    stopped = frozenset(end.request_id for end in events.finished if end.reason is FinishReason.STOP)
    if not stopped:
        return ()
    return tuple(index for index, request_id in enumerate(_row_ids(plan)) if request_id in stopped)


def _row_ids(plan: StepPlan) -> list[RequestId]:
    return [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]


def _failed_rows(plan: StepPlan, result: StepResult) -> tuple[tuple[int, str, bool], ...]:
    if not result.failed:
        return ()
    failed = {failure.request_id: failure for failure in result.failed}
    return tuple(
        (index, failed[request_id].reason, failed[request_id].poison)
        for index, request_id in enumerate(_row_ids(plan))
        if request_id in failed
    )


class Recorder:
    """The recording of a worker, epoch after epoch. Always: at most one engine records at a time.

    ``may_wait``: the engine is held up by a slow disk rather than the recording given up; for clocks that are not real.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        *,
        worker_id: str,
        model: str,
        may_wait: bool = False,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._writer = LogWriter(folder, limit_bytes, unix_s, may_wait=may_wait)
        self._unix_s = unix_s
        self._most_file_bytes = limit_bytes // 4
        self._worker_id = worker_id
        self._model = model
        self._engine: RecordingScheduler | None = None

    def scheduler(
        self, config: EngineConfig, policy: PolicySnapshot, cost: CostConstants, *, epoch: int
    ) -> RecordingScheduler:
        """An engine for the epoch that begins; the one before it is over."""
        self._close_engine()
        origin = Origin(worker_id=self._worker_id, epoch=epoch, model=self._model)
        self._engine = RecordingScheduler(
            config,
            policy,
            cost,
            origin=origin,
            writer=self._writer,
            most_file_bytes=self._most_file_bytes,
            unix_s=self._unix_s,
        )
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        self._close_engine()
        self._writer.close()


@contextlib.contextmanager
def recorded_engine(
    folder: Path | None, name: str, unix_s: Callable[[], float] = time.time
) -> Iterator[Callable[..., Scheduler]]:
    """What makes a simulation's engine: one that records to the folder, without a bound, or a plain one for None."""
    if folder is None:
        yield Scheduler
        return
    recorder = Recorder(folder, _NO_LIMIT, worker_id="simulated", model=name, may_wait=True, unix_s=unix_s)
    try:
        yield functools.partial(recorder.scheduler, epoch=1)
    finally:
        recorder.close()
