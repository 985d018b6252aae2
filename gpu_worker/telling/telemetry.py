"""What a worker tells of itself: counters and histograms per class, and the LoadSnapshot made from them.

Knows durations and counts; refuses to know who reads them (no Prometheus, no Django).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_worker.telling.fairness_watch import FairnessWatch, gap_bound_us
from scheduler_engine.events import Finished
from scheduler_engine.load import ClassLoad, EngineLoad, PolicyLoad
from scheduler_engine.policy import ClassPolicy, PriorityClass
from scheduler_engine.scheduler import Scheduler
from wire.messages import (
    HISTOGRAM_BOUNDS_MS,
    BoardRow,
    ClassSnapshot,
    EngineCounters,
    Histogram,
    LoadSnapshot,
    PolicyNews,
)

_BOUNDS_US = tuple(bound_ms * 1_000 for bound_ms in HISTOGRAM_BOUNDS_MS)


class DurationHistogram:
    """Always: the counts add up to the number of durations observed."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_US) + 1)
        self._sum_us = 0

    def observe(self, duration_us: int) -> None:
        self._counts[bisect_left(_BOUNDS_US, duration_us)] += 1
        self._sum_us += duration_us

    def value(self) -> Histogram:
        return Histogram(counts=tuple(self._counts), sum_us=self._sum_us)


class ClassTelemetry:
    """Counters of one class since the epoch began; none ever falls.

    Once nothing is in flight, ``prompt_tokens`` and ``output_tokens`` equal the sums over the class's Usage messages.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.queue_wait = DurationHistogram()
        self.ttft = DurationHistogram()
        self.tpot = DurationHistogram()
        self.duration = DurationHistogram()
        self.recomputed_tokens = 0
        self.swapped_bytes = 0
        self.preemptions: Counter[tuple[str, str]] = Counter()
        self.shed: Counter[str] = Counter()

    def ended(self, ends: Sequence[Finished], counters: EngineCounters) -> None:
        """A response that was not shed."""
        self.duration.observe(counters.total_us)
        self.recomputed_tokens += counters.recomputed_tokens
        self.swapped_bytes += counters.swapped_bytes
        for end in ends:
            ttft_us = end.counters.ttft_us
            if ttft_us is not None and end.output_tokens > 1:
                self.tpot.observe((end.counters.total_us - ttft_us) // (end.output_tokens - 1))

    def snapshot(self, load: ClassLoad, policy: ClassPolicy, *, gap_us: int, gap_bound_us: int) -> ClassSnapshot:
        return ClassSnapshot(
            priority_class=load.priority_class,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_suspended=load.num_suspended,
            waiting_gpu_us=load.waiting_gpu_us,
            estimated_start_q50_us=load.estimated_start_q50_us,
            estimated_start_q90_us=load.estimated_start_q90_us,
            closed=load.closed,
            retry_after_us=load.retry_after_us,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            queue_wait=self.queue_wait.value(),
            ttft=self.ttft.value(),
            preemptions=tuple(
                (lever, resource, count) for (lever, resource), count in sorted(self.preemptions.items())
            ),
            shed=tuple(sorted(self.shed.items())),
            tpot=self.tpot.value(),
            duration=self.duration.value(),
            ttft_target_us=_us(policy.ttft_target_ms),
            tpot_target_us=_us(policy.tbt_target_ms),
            floor_debt_us=load.floor_debt_us,
            slot_cap=load.slot_cap,
            reserve_blocks=load.reserve_blocks,
            num_promises_kept=load.num_promises_kept,
            num_promises_broken=load.num_promises_broken,
            fairness_gap_us=gap_us,
            fairness_bound_us=gap_bound_us,
            recomputed_tokens=self.recomputed_tokens,
            swapped_bytes=self.swapped_bytes,
        )


def _us(milliseconds: int | None) -> int | None:
    return None if milliseconds is None else milliseconds * 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who is speaking: fixed for the life of one epoch."""

    worker_id: str
    epoch: int
    model: str
    max_model_len: int
    features: tuple[str, ...] = ()
    num_cache_tokens: int = 0
    bytes_per_block: int = 0
    version: str = ""


class Telemetry:
    """One ClassTelemetry per class, and what is the whole worker's. Always: no count falls while the epoch lasts."""

    def __init__(self) -> None:
        self.classes = {priority_class: ClassTelemetry() for priority_class in PriorityClass}
        self.fairness = FairnessWatch()
        self.scheduling_us = 0
        self.num_empty_steps = 0
        self.longest_step_us = 0
        self._began_at_us: int | None = None

    def stepped(self, *, scheduling_us: int, duration_us: int, is_empty: bool) -> None:
        """One step: what the scheduler took for it, and what the device did."""
        self.scheduling_us += scheduling_us
        self.num_empty_steps += is_empty
        self.longest_step_us = max(self.longest_step_us, duration_us)

    def snapshot(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        response_id_of: Callable[[str], str],
        *,
        now_us: int,
        policy_version: int,
        draining: bool,
    ) -> LoadSnapshot:
        """The worker at one step boundary; ``last_step_age_us`` is filled in by whoever publishes it."""
        if self._began_at_us is None:
            self._began_at_us = now_us
        load = scheduler.load(now_us)
        self.fairness.look(scheduler, now_us)
        return LoadSnapshot(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            model=identity.model,
            ready=not draining,  # an epoch begins after loading and calibration; before it the worker says nothing
            draining=draining,
            max_model_len=identity.max_model_len,
            last_step_age_us=0,
            step=load.step,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
            num_host_blocks=load.num_host_blocks,
            num_free_host_blocks=load.num_free_host_blocks,
            num_slots=load.num_slots,
            num_free_slots=load.num_free_slots,
            policy_version=policy_version,
            prompt_tokens_total=sum(counters.prompt_tokens for counters in self.classes.values()),
            output_tokens_total=sum(counters.output_tokens for counters in self.classes.values()),
            busy_us_total=load.busy_us,
            classes=tuple(self._class(row, scheduler, load) for row in load.classes),
            board=tuple(
                BoardRow(
                    response_id=response_id_of(row.request_id),
                    tenant_id=row.tenant_id,
                    priority_class=row.priority_class,
                    state=row.state,
                    num_blocks=row.num_blocks,
                    num_computed_tokens=row.num_computed_tokens,
                    num_output_tokens=row.num_output_tokens,
                )
                for row in load.board
            ),
            features=identity.features,
            num_cache_tokens=identity.num_cache_tokens,
            version=identity.version,
            epoch_age_us=now_us - self._began_at_us,
            scheduling_us_total=self.scheduling_us,
            num_empty_steps=self.num_empty_steps,
            num_checkpoint_blocks=load.num_checkpoint_blocks,
            checkpoint_lag_blocks=load.checkpoint_lag_blocks,
            num_blocks_saved_ahead_total=load.num_blocks_saved_ahead,
            bytes_per_block=identity.bytes_per_block,
            policy=_news(load.policy),
            tenants=self.fairness.tenants,
        )

    def _class(self, row: ClassLoad, scheduler: Scheduler, load: EngineLoad) -> ClassSnapshot:
        policy = scheduler.policy.classes[row.priority_class]
        bound_us = gap_bound_us(policy, num_slots=load.num_slots, longest_step_us=self.longest_step_us)
        gap_us = self.fairness.gaps_us[row.priority_class]
        return self.classes[row.priority_class].snapshot(row, policy, gap_us=gap_us, gap_bound_us=bound_us)


def _news(policy: PolicyLoad) -> PolicyNews:
    return PolicyNews(
        rung=policy.rung,
        batch_paused_us=policy.batch_paused_us,
        num_batch_pauses=policy.num_batch_pauses,
        switching_per_mille=policy.switching_per_mille,
        num_governor_cuts=policy.num_governor_cuts,
        num_bypasses=policy.num_bypasses,
        num_relegations=policy.num_relegations,
        num_kept_out=policy.num_kept_out,
        num_rests=policy.num_rests,
        sheds=tuple((row.priority_class.label, row.rung, row.reason, row.count) for row in policy.sheds),
        preemptions=tuple(
            (
                row.priority_class.label,
                "" if row.by_class is None else row.by_class.label,
                row.resource,
                row.lever,
                row.count,
            )
            for row in policy.preemptions
        ),
    )
