"""What Prometheus may read: the workers' counts from their LoadSnapshots, and this gateway's of its answers.

Knows names, units and bounded labels; refuses to know tenants, keys and texts. Money and quotas are read from the
database, never from here: these counters begin again at 0 with their process (the start time and the epoch say when).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.loads import Loads, books, loads
from scheduler_engine.events import Lever, RejectReason, Resource
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError
from wire.messages import HISTOGRAM_BOUNDS_MS, ClassSnapshot, Histogram, LoadSnapshot

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
StreamKind = Literal["sse", "websocket"]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_LEVERS = frozenset(Lever)
_RESOURCES = frozenset(Resource)
_REASONS = frozenset(RejectReason)


@dataclass(slots=True)
class GatewayCounters:
    """What one gateway process answered. Always: written from its event loop only, and counters never fall."""

    started_at_s: float = field(default_factory=time.time)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    streams_open: Counter[StreamKind] = field(default_factory=Counter)

    def count_request(self, status: int, priority_class: PriorityClass | None) -> None:
        """One answer given; ``priority_class`` is None where the request ended before a class was known."""
        label = "none" if priority_class is None else priority_class.label
        self.requests[str(status) if 100 <= status <= 599 else "other", label] += 1

    @contextmanager
    def open_stream(self, kind: StreamKind) -> Iterator[None]:
        """Count a stream as open while the block runs, however it ends."""
        self.streams_open[kind] += 1
        try:
            yield
        finally:
            self.streams_open[kind] -= 1


counters = GatewayCounters()
count_request = counters.count_request
open_stream = counters.open_stream


def render(
    snapshots: Sequence[LoadSnapshot],
    gateway: GatewayCounters,
    *,
    bus_up: bool = True,
    compared: Mapping[str, object] | None = None,
    now_s: float = 0.0,
) -> bytes:
    """The whole page in Prometheus' text format. Pure. ``compared`` is the last ``books_watch.Comparison``, as JSON."""
    families = (*_gateway_families(gateway, bus_up), *_books_families(compared, now_s), *_worker_families(snapshots))
    return generate_latest(_Page(families))


async def application(scope: dict[str, Any], _receive: object, send: Send) -> None:
    """The raw ASGI app at ``/metrics``."""
    await respond(scope["method"], send, loads, counters)


async def respond(method: str, send: Send, read_loads: Loads, gateway: GatewayCounters) -> None:
    """Answer GET and HEAD with ``render``.

    While the Bus is down this still answers 200, with ``rubato_bus_up 0`` and without workers: a scrape must not fail
    at the moment when somebody wants to look.
    """
    if method not in {"GET", "HEAD"}:
        await _answer(send, 405, b"", (b"allow", b"GET, HEAD"))
        return
    try:
        page = render(await read_loads(), gateway, compared=books.newest, now_s=time.time())
    except BusError:
        page = render((), gateway, bus_up=False)
    body = page if method == "GET" else b""
    await _answer(send, 200, body, (b"content-type", CONTENT_TYPE), (b"cache-control", b"no-store"))


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True, slots=True)
class _Page(Collector):
    """The registry's face that ``generate_latest`` needs, over families made for one scrape."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        return self.families


def _gateway_families(gateway: GatewayCounters, bus_up: bool) -> Iterator[Metric]:
    yield GaugeMetricFamily("rubato_bus_up", "1 while this gateway reaches the Bus", value=int(bus_up))
    yield GaugeMetricFamily(
        "rubato_gateway_start_time_seconds", "When this gateway's counters began at 0", value=gateway.started_at_s
    )
    requests = CounterMetricFamily("rubato_http_requests", "Answers given on /v1", labels=("status", "class"))
    for labels, count in sorted(gateway.requests.items()):
        requests.add_metric(labels, count)
    yield requests
    streams = GaugeMetricFamily("rubato_streams_open", "Streams being written to clients", labels=("kind",))
    for kind in ("sse", "websocket"):
        streams.add_metric((kind,), gateway.streams_open[kind])
    yield streams


def _books_families(compared: Mapping[str, object] | None, now_s: float) -> Iterator[Metric]:
    """Nothing where no comparison is known: an alert on its absence is the right one."""
    if compared is None:
        return
    difference = GaugeMetricFamily(
        "rubato_reconcile_difference_tokens", "Engines minus ledger; 0, always", labels=("kind",)
    )
    for kind in ("prompt", "output"):
        difference.add_metric((kind,), _number(compared.get(f"engine_ledger_{kind}_tokens")))
    yield difference
    for name, text, key in (
        ("reconcile_wrong_rollups", "Roll-up rows that are not the ledger's sums; 0, always", "wrong_rollups"),
        ("usage_waiting", "Messages that the ledger has not acknowledged", "num_waiting"),
        ("ledger_alerts_open", "Findings that nobody has closed", "num_open_alerts"),
    ):
        yield GaugeMetricFamily(f"rubato_{name}", text, value=_number(compared.get(key)))
    age_s = max(0.0, now_s - datetime.fromisoformat(str(compared["at"])).timestamp())
    yield GaugeMetricFamily("rubato_reconcile_age_seconds", "Since the books were compared", value=age_s)


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else float("nan")


def _worker_families(snapshots: Sequence[LoadSnapshot]) -> Iterator[Metric]:
    yield from _device_families(snapshots)
    by_class = [(load.worker_id, row) for load in snapshots for row in load.classes]
    yield from _class_gauges(by_class)
    yield from _class_counters(by_class)
    yield _histograms("rubato_queue_wait_seconds", "From arrival to the first scheduled step", by_class, "queue_wait")
    yield _histograms("rubato_time_to_first_token_seconds", "From arrival to the first output token", by_class, "ttft")


def _device_families(snapshots: Sequence[LoadSnapshot]) -> Iterator[Metric]:
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
    for load in snapshots:
        for pool, total, free in (
            ("device", load.num_blocks, load.num_free_blocks),
            ("host", load.num_host_blocks, load.num_free_host_blocks),
        ):
            blocks.add_metric((load.worker_id, pool, "free"), free)
            blocks.add_metric((load.worker_id, pool, "used"), total - free)
    yield blocks


_WORKER_GAUGES: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("worker_ready", "1 while the worker takes work", lambda load: int(load.ready and not load.draining)),
    ("worker_epoch", "Epoch of the worker: its counters began at 0 with it", lambda load: load.epoch),
    ("slots", "Places in a step", lambda load: load.num_slots),
    ("slots_free", "Places in a step that nobody holds", lambda load: load.num_free_slots),
    ("policy_version", "Policy in force in the engine", lambda load: load.policy_version),
    ("last_step_age_seconds", "Since the last step ended", lambda load: load.last_step_age_us / 1_000_000),
)
_WORKER_COUNTERS: tuple[tuple[str, str, Callable[[LoadSnapshot], float]], ...] = (
    ("steps", "Steps planned", lambda load: load.step),
    ("busy_seconds", "Time spent in steps", lambda load: load.busy_us_total / 1_000_000),
)

ClassRow = tuple[str, ClassSnapshot]  # worker id and one of its classes


def _class_gauges(by_class: Sequence[ClassRow]) -> Iterator[Metric]:
    requests = GaugeMetricFamily("rubato_requests", "Requests in the engine", labels=("worker", "class", "state"))
    backlog = GaugeMetricFamily("rubato_waiting_gpu_seconds", "Device time that waits", labels=("worker", "class"))
    closed = GaugeMetricFamily("rubato_class_closed", "1 while new work is refused", labels=("worker", "class"))
    for worker_id, row in by_class:
        label = row.priority_class.label
        for state, count in (
            ("waiting", row.num_waiting),
            ("running", row.num_running),
            ("suspended", row.num_suspended),
        ):
            requests.add_metric((worker_id, label, state), count)
        backlog.add_metric((worker_id, label), row.waiting_gpu_us / 1_000_000)
        closed.add_metric((worker_id, label), int(row.closed))
    yield from (requests, backlog, closed)


def _class_counters(by_class: Sequence[ClassRow]) -> Iterator[Metric]:
    tokens = CounterMetricFamily("rubato_tokens", "Tokens computed once", labels=("worker", "class", "kind"))
    preemptions = CounterMetricFamily(
        "rubato_preemptions", "Requests that gave way", labels=("worker", "class", "lever", "resource")
    )
    shed = CounterMetricFamily("rubato_shed", "Ended before the first token", labels=("worker", "class", "reason"))
    for worker_id, row in by_class:
        label = row.priority_class.label
        tokens.add_metric((worker_id, label, "prompt"), row.prompt_tokens)
        tokens.add_metric((worker_id, label, "output"), row.output_tokens)
        for (lever, resource), count in _bounded_preemptions(row).items():
            preemptions.add_metric((worker_id, label, lever, resource), count)
        for reason, count in _bounded_shed(row).items():
            shed.add_metric((worker_id, label, reason), count)
    yield from (tokens, preemptions, shed)


def _bounded_preemptions(row: ClassSnapshot) -> Counter[tuple[str, str]]:
    """Words that this gateway does not know (a newer worker's) add up under ``other``: labels stay bounded."""
    bounded: Counter[tuple[str, str]] = Counter()
    for lever, resource, count in row.preemptions:
        bounded[lever if lever in _LEVERS else "other", resource if resource in _RESOURCES else "other"] += count
    return bounded


def _bounded_shed(row: ClassSnapshot) -> Counter[str]:
    bounded: Counter[str] = Counter()
    for reason, count in row.shed:
        bounded[reason if reason in _REASONS else "other"] += count
    return bounded


def _histograms(
    name: str, text: str, by_class: Sequence[ClassRow], which: Literal["queue_wait", "ttft"]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=("worker", "class"))
    for worker_id, row in by_class:
        histogram: Histogram = row.ttft if which == "ttft" else row.queue_wait
        family.add_metric((worker_id, row.priority_class.label), _buckets(histogram), histogram.sum_us / 1_000_000)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus wants cumulative counts and seconds, and the rest under ``+Inf``."""
    total = 0
    buckets = []
    for bound, count in zip((*(str(ms / 1_000) for ms in HISTOGRAM_BOUNDS_MS), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
