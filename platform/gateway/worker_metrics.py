"""The workers' LoadSnapshots as metric families for Prometheus, with bounded labels.

Knows names and units (docs/operations.md lists what they are for); refuses to know scrapes, keys and texts. Counters
begin again at 0 with their worker's epoch: ``rubato_worker_start_time_seconds`` says when that was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from scheduler_engine.events import Lever, RejectReason, Resource
from scheduler_engine.overload import Rung
from scheduler_engine.policy import PriorityClass
from wire.snapshots import HISTOGRAM_BOUNDS_MS, MOST_TENANTS, ClassSnapshot, Histogram, LoadSnapshot

_LEVERS = frozenset(Lever)
_RESOURCES = frozenset(Resource)
_REASONS = frozenset(RejectReason)
_RUNGS = tuple(rung.name.lower() for rung in Rung)
_CLASSES = frozenset(priority_class.label for priority_class in PriorityClass)
_US = 1_000_000

Read = Callable[[LoadSnapshot], float]
ReadClass = Callable[[ClassSnapshot], float]

_WORKER_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("worker_ready", "1 while the worker takes work", lambda load: int(load.ready and not load.draining)),
    ("worker_epoch", "Epoch of the worker: its counters began at 0 with it", lambda load: load.epoch),
    ("slots", "Places in a step", lambda load: load.num_slots),
    ("slots_free", "Places in a step that nobody holds", lambda load: load.num_free_slots),
    ("policy_version", "Policy in force in the engine", lambda load: load.policy_version),
    ("last_step_age_seconds", "Since the last step ended", lambda load: load.last_step_age_us / _US),
    (
        "checkpoint_blocks",
        "Host blocks that copy, ahead of need, what is on the device",
        lambda load: load.num_checkpoint_blocks,
    ),
    (
        "checkpoint_bytes",
        "The same in bytes",
        lambda load: load.num_checkpoint_blocks * load.bytes_per_block,
    ),
    (
        "checkpoint_lag_blocks",
        "Full blocks of those likely to give way that have no such copy",
        lambda load: load.checkpoint_lag_blocks,
    ),
    (
        "switching_ratio",
        "Share of the last ten seconds' busy time that copies and recomputation took (thrash)",
        lambda load: load.policy.switching_per_mille / 1_000,
    ),
)
_WORKER_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("steps", "Steps planned", lambda load: load.step),
    ("empty_steps", "Steps in which nothing was computed", lambda load: load.num_empty_steps),
    ("busy_seconds", "Time spent in steps", lambda load: load.busy_us_total / _US),
    ("scheduler_seconds", "Time spent planning and applying steps", lambda load: load.scheduling_us_total / _US),
    ("saved_ahead_blocks", "Blocks copied to the host ahead of need", lambda load: load.num_blocks_saved_ahead_total),
    (
        "saved_ahead_bytes",
        "The same in bytes",
        lambda load: load.num_blocks_saved_ahead_total * load.bytes_per_block,
    ),
    ("batch_paused_seconds", "Batch had work and was paused", lambda load: load.policy.batch_paused_us / _US),
    ("batch_pauses", "Times batch was paused", lambda load: load.policy.num_batch_pauses),
    (
        "governor_cuts",
        "Times fewer were let run, as switching cost",
        lambda load: load.policy.num_governor_cuts,
    ),
    ("bypasses", "Blocked heads that a smaller request passed", lambda load: load.policy.num_bypasses),
    ("relegations", "Requests put behind the others of their class", lambda load: load.policy.num_relegations),
    ("kept_out", "Heads that left the last room to tenants with less", lambda load: load.policy.num_kept_out),
    ("rests", "Heads that stayed out of memory just taken from their class", lambda load: load.policy.num_rests),
)
_CLASS_GAUGES: tuple[tuple[str, str, ReadClass], ...] = (
    ("waiting_gpu_seconds", "Device time that waits", lambda row: row.waiting_gpu_us / _US),
    ("class_closed", "1 while new work is refused", lambda row: int(row.closed)),
    ("floor_debt_seconds", "Device time that the class's floor owes it", lambda row: row.floor_debt_us / _US),
    ("slot_cap", "How many may run at once, by policy and governor", lambda row: row.slot_cap),
    ("reserve_blocks", "Blocks kept free of the class for those above", lambda row: row.reserve_blocks),
    (
        "fairness_gap_seconds",
        "Device time over weight, most minus least, of tenants that wait",
        lambda row: row.fairness_gap_us / _US,
    ),
    ("fairness_gap_bound_seconds", "What that gap cannot pass", lambda row: row.fairness_bound_us / _US),
)
_CLASS_COUNTERS: tuple[tuple[str, str, ReadClass], ...] = (
    ("recomputed_tokens", "Tokens computed more than once, of ended requests", lambda row: row.recomputed_tokens),
    ("swapped_bytes", "KV copied to the host or back, of ended requests", lambda row: row.swapped_bytes),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ClassSnapshot], Histogram]], ...] = (
    ("rubato_queue_wait_seconds", "From arrival to the first scheduled step", lambda row: row.queue_wait),
    ("gen_ai_server_time_to_first_token_seconds", "From arrival to the first output token", lambda row: row.ttft),
    ("gen_ai_server_time_per_output_token_seconds", "Per token after the first", lambda row: row.tpot),
    ("gen_ai_server_request_duration_seconds", "From arrival to the end", lambda row: row.duration),
)


class TenantNames:
    """Which tenants have series of their own. Always: at most MOST_TENANTS, and once named, for as long as we live."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._named: dict[str, None] = {}

    def label(self, tenant_id: str) -> str:
        if tenant_id and tenant_id not in self._named and len(self._named) < self._most:
            self._named[tenant_id] = None
        return tenant_id if tenant_id in self._named else "other"


def worker_families(
    snapshots: Sequence[LoadSnapshot], *, now_s: float, tenants: TenantNames | None = None
) -> Iterator[Metric]:
    """All that workers tell. ``tenants`` None: nothing that names one."""
    yield from _device_families(snapshots, now_s)
    by_class = [(load, row) for load in snapshots for row in load.classes]
    yield from _class_gauges(by_class)
    yield from _class_counters(by_class)
    yield from _policy_families(snapshots)
    for name, text, histogram_of in _HISTOGRAMS:
        yield _histograms(name, text, by_class, histogram_of)
    yield from _gpu_seconds(snapshots, tenants)


def _device_families(snapshots: Sequence[LoadSnapshot], now_s: float) -> Iterator[Metric]:
    for name, text, value_of in _WORKER_GAUGES:
        gauge = GaugeMetricFamily(f"rubato_{name}", text, labels=("worker",))
        for load in snapshots:
            gauge.add_metric((load.worker_id,), value_of(load))
        yield gauge
    for name, text, value_of in _WORKER_COUNTERS:
        counter = CounterMetricFamily(f"rubato_{name}", text, labels=("worker",))
        for load in snapshots:
            counter.add_metric((load.worker_id,), value_of(load))
        yield counter
    blocks = GaugeMetricFamily("rubato_kv_blocks", "KV blocks by pool and use", labels=("worker", "pool", "state"))
    info = GaugeMetricFamily("rubato_worker_info", "1, with what is served", labels=("worker", "version", "model"))
    began = GaugeMetricFamily("rubato_worker_start_time_seconds", "When its counters began at 0", labels=("worker",))
    for load in snapshots:
        for pool, total, free in (
            ("device", load.num_blocks, load.num_free_blocks),
            ("host", load.num_host_blocks, load.num_free_host_blocks),
        ):
            blocks.add_metric((load.worker_id, pool, "free"), free)
            blocks.add_metric((load.worker_id, pool, "used"), total - free)
        info.add_metric((load.worker_id, load.version or "unknown", load.model), 1)
        began.add_metric((load.worker_id,), round(now_s - load.epoch_age_us / _US))
    yield from (blocks, info, began)


ClassRow = tuple[LoadSnapshot, ClassSnapshot]


def _class_gauges(by_class: Sequence[ClassRow]) -> Iterator[Metric]:
    requests = GaugeMetricFamily("rubato_requests", "Requests in the engine", labels=("worker", "class", "state"))
    starts = GaugeMetricFamily(
        "rubato_estimated_start_seconds", "Wait of one who comes now", labels=("worker", "class", "quantile")
    )
    targets = GaugeMetricFamily("rubato_target_seconds", "Of the policy", labels=("worker", "class", "target"))
    for load, row in by_class:
        where = (load.worker_id, row.priority_class.label)
        requests.add_metric((*where, "waiting"), row.num_waiting)
        requests.add_metric((*where, "running"), row.num_running)
        requests.add_metric((*where, "suspended"), row.num_suspended)
        starts.add_metric((*where, "0.5"), row.estimated_start_q50_us / _US)
        starts.add_metric((*where, "0.9"), row.estimated_start_q90_us / _US)
        for target, target_us in (("ttft", row.ttft_target_us), ("tpot", row.tpot_target_us)):
            if target_us is not None:
                targets.add_metric((*where, target), target_us / _US)
    yield from (requests, starts, targets)
    for name, text, value_of in _CLASS_GAUGES:
        gauge = GaugeMetricFamily(f"rubato_{name}", text, labels=("worker", "class"))
        for load, row in by_class:
            gauge.add_metric((load.worker_id, row.priority_class.label), value_of(row))
        yield gauge


def _class_counters(by_class: Sequence[ClassRow]) -> Iterator[Metric]:
    tokens = CounterMetricFamily("rubato_tokens", "Tokens computed once", labels=("worker", "class", "kind"))
    preemptions = CounterMetricFamily(
        "rubato_preemptions", "Requests that gave way", labels=("worker", "class", "lever", "resource")
    )
    shed = CounterMetricFamily("rubato_shed", "Ended before the first token", labels=("worker", "class", "reason"))
    promises = CounterMetricFamily(
        "rubato_retry_promises", "Came back at their Retry-After", labels=("worker", "class", "outcome")
    )
    for load, row in by_class:
        where = (load.worker_id, row.priority_class.label)
        tokens.add_metric((*where, "prompt"), row.prompt_tokens)
        tokens.add_metric((*where, "output"), row.output_tokens)
        promises.add_metric((*where, "kept"), row.num_promises_kept)
        promises.add_metric((*where, "broken"), row.num_promises_broken)
        for labels, count in _bounded_preemptions(row).items():
            preemptions.add_metric((*where, *labels), count)
        for reason, count in _bounded_shed(row).items():
            shed.add_metric((*where, reason), count)
    yield from (tokens, preemptions, shed, promises)
    for name, text, value_of in _CLASS_COUNTERS:
        counter = CounterMetricFamily(f"rubato_{name}", text, labels=("worker", "class"))
        for load, row in by_class:
            counter.add_metric((load.worker_id, row.priority_class.label), value_of(row))
        yield counter


def _policy_families(snapshots: Sequence[LoadSnapshot]) -> Iterator[Metric]:
    """What the engine counts of itself: also of requests that were never one of a response."""
    rung = GaugeMetricFamily("rubato_shedding_rung", "1 for the rung it stands on", labels=("worker", "rung"))
    sheds = CounterMetricFamily(
        "rubato_shed_by_rung", "Refused or ended before the start", labels=("worker", "class", "rung", "reason")
    )
    gave_way = CounterMetricFamily(
        "rubato_preemptions_by_class",
        "Requests that gave way, and to which class",
        labels=("worker", "class", "by_class", "lever", "resource"),
    )
    for load in snapshots:
        for name in _RUNGS:
            rung.add_metric((load.worker_id, name), int(load.policy.rung == name))
        counts: Counter[tuple[str, ...]] = Counter()
        for label, name, reason, count in load.policy.sheds:
            counts[_known(label, _CLASSES), _known(name, _RUNGS), _known(reason, _REASONS)] += count
        for labels, count in counts.items():
            sheds.add_metric((load.worker_id, *labels), count)
        counts = Counter()
        for label, by_label, resource, lever, count in load.policy.preemptions:
            by_class = _known(by_label, _CLASSES) if by_label else "none"
            counts[_known(label, _CLASSES), by_class, _known(lever, _LEVERS), _known(resource, _RESOURCES)] += count
        for labels, count in counts.items():
            gave_way.add_metric((load.worker_id, *labels), count)
    yield from (rung, sheds, gave_way)


def _gpu_seconds(snapshots: Sequence[LoadSnapshot], tenants: TenantNames | None) -> Iterator[Metric]:
    of_class = CounterMetricFamily("rubato_gpu_seconds", "Device time charged", labels=("worker", "class"))
    of_tenant = CounterMetricFamily(
        "rubato_tenant_gpu_seconds", "Device time charged", labels=("worker", "class", "tenant")
    )
    weight = GaugeMetricFamily("rubato_tenant_weight", "Of tenants with work here", labels=("worker", "tenant"))
    for load in snapshots:
        charged: Counter[tuple[str, str]] = Counter()
        weights: Counter[str] = Counter()
        for row in load.tenants:
            name = "other" if tenants is None else tenants.label(row.tenant_id)
            weights[name] += row.weight
            for priority_class, gpu_us in zip(PriorityClass, row.gpu_us, strict=False):
                charged[priority_class.label, name] += gpu_us
        for priority_class in PriorityClass:
            label = priority_class.label
            all_us = sum(us for (name, _), us in charged.items() if name == label)
            of_class.add_metric((load.worker_id, label), all_us / _US)
        for (label, name), gpu_us in charged.items():
            of_tenant.add_metric((load.worker_id, label, name), gpu_us / _US)
        for name, total in weights.items():
            weight.add_metric((load.worker_id, name), total)
    yield of_class
    if tenants is not None:
        yield from (of_tenant, weight)


def _known(word: str, known: frozenset[str] | tuple[str, ...]) -> str:
    """Words that this gateway does not know (a newer worker's) add up under ``other``: labels stay bounded."""
    return word if word in known else "other"


def _bounded_preemptions(row: ClassSnapshot) -> Counter[tuple[str, str]]:
    bounded: Counter[tuple[str, str]] = Counter()
    for lever, resource, count in row.preemptions:
        bounded[_known(lever, _LEVERS), _known(resource, _RESOURCES)] += count
    return bounded


def _bounded_shed(row: ClassSnapshot) -> Counter[str]:
    bounded: Counter[str] = Counter()
    for reason, count in row.shed:
        bounded[_known(reason, _REASONS)] += count
    return bounded


def _histograms(
    name: str, text: str, by_class: Sequence[ClassRow], histogram_of: Callable[[ClassSnapshot], Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=("worker", "class", "gen_ai_request_model"))
    for load, row in by_class:
        histogram = histogram_of(row)
        labels = (load.worker_id, row.priority_class.label, load.model)
        family.add_metric(labels, _buckets(histogram), histogram.sum_us / _US)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus wants cumulative counts and seconds, and the rest under ``+Inf``."""
    total = 0
    buckets = []
    for bound, count in zip((*(str(ms / 1_000) for ms in HISTOGRAM_BOUNDS_MS), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
