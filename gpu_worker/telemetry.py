"""What a worker tells of itself: counters and histograms per class, and the LoadSnapshot made from them.

Knows durations and counts; refuses to know who reads them (no Prometheus, no Django).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_engine.load import ClassLoad, EngineLoad
from scheduler_engine.policy import PriorityClass
from wire.messages import HISTOGRAM_BOUNDS_MS, BoardRow, ClassSnapshot, Histogram, LoadSnapshot

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
        self.preemptions: Counter[tuple[str, str]] = Counter()
        self.shed: Counter[str] = Counter()

    def snapshot(self, load: ClassLoad) -> ClassSnapshot:
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who is speaking: fixed for the life of one epoch."""

    worker_id: str
    epoch: int
    model: str
    max_model_len: int
    features: tuple[str, ...] = ()
    num_cache_tokens: int = 0


class Telemetry:
    """One ClassTelemetry per class."""

    def __init__(self) -> None:
        self.classes = {priority_class: ClassTelemetry() for priority_class in PriorityClass}

    def snapshot(
        self,
        identity: WorkerIdentity,
        load: EngineLoad,
        response_id_of: Callable[[str], str],
        *,
        policy_version: int,
        draining: bool,
    ) -> LoadSnapshot:
        """The worker at one step boundary; ``last_step_age_us`` is filled in by whoever publishes it."""
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
            classes=tuple(self.classes[row.priority_class].snapshot(row) for row in load.classes),
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
        )
