"""What Prometheus may read: the workers' counts from their LoadSnapshots, and this gateway's of its answers.

Knows names, units and who may read what: tenants are named only to who brings RUBATO_METRICS_TOKEN. Money and quotas
are read from the database, never from here: these counters begin again at 0 with their process, and say when.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from django.conf import settings
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.loads import Loads, ages, books, loads
from gateway.worker_metrics import TenantNames, worker_families
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError
from wire.snapshots import LoadSnapshot

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
StreamKind = Literal["sse", "websocket"]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class GatewayCounters:
    """What one gateway process answered. Always: written from its event loop only, and counters never fall."""

    started_at_s: float = field(default_factory=time.time)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    streams_open: Counter[StreamKind] = field(default_factory=Counter)
    downgrades: Counter[tuple[str, str]] = field(default_factory=Counter)
    tenant_names: TenantNames = field(default_factory=TenantNames)

    def count_request(self, status: int, priority_class: PriorityClass | None) -> None:
        """One answer given; ``priority_class`` is None where the request ended before a class was known."""
        self._count(status, "none" if priority_class is None else priority_class.label)

    def count_management(self, status: int) -> None:
        """One answer of the management API, which knows no classes."""
        self._count(status, "management")

    def _count(self, status: int, label: str) -> None:
        self.requests[str(status) if 100 <= status <= 599 else "other", label] += 1

    def count_downgrade(self, requested: PriorityClass, served: PriorityClass) -> None:
        """One response let in, in a lower class than it asked for."""
        self.downgrades[requested.label, served.label] += 1

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
count_management = counters.count_management
count_downgrade = counters.count_downgrade
open_stream = counters.open_stream


def render(
    snapshots: Sequence[LoadSnapshot],
    gateway: GatewayCounters,
    *,
    bus_up: bool = True,
    ages_s: Mapping[str, float] | None = None,
    compared: Mapping[str, object] | None = None,
    now_s: float = 0.0,
    names_tenants: bool = False,
) -> bytes:
    """The whole page in Prometheus' text format. ``compared`` is the last ``books_watch.Comparison``, as JSON;
    ``ages_s`` what ``loads.ages`` says.
    """
    families = (
        *_gateway_families(gateway, bus_up, ages_s or {}),
        *_books_families(compared, now_s),
        *worker_families(snapshots, now_s=now_s, tenants=gateway.tenant_names if names_tenants else None),
    )
    return generate_latest(_Page(families))


async def application(scope: dict[str, Any], _receive: object, send: Send) -> None:
    """The raw ASGI app at ``/metrics``."""
    await respond(scope["method"], send, loads, counters, names_tenants=_brings_token(scope))


def _brings_token(scope: Mapping[str, Any]) -> bool:
    token = settings.RUBATO_METRICS_TOKEN
    given = dict(scope.get("headers", ())).get(b"authorization", b"")
    return bool(token) and secrets.compare_digest(given, f"Bearer {token}".encode())


async def respond(
    method: str, send: Send, read_loads: Loads, gateway: GatewayCounters, *, names_tenants: bool = False
) -> None:
    """Answer GET and HEAD with ``render``.

    While the Bus is down this still answers 200, with ``rubato_bus_up 0`` and without workers: a scrape must not fail
    at the moment when somebody wants to look.
    """
    if method not in {"GET", "HEAD"}:
        await _answer(send, 405, b"", (b"allow", b"GET, HEAD"))
        return
    try:
        page = render(
            await read_loads(),
            gateway,
            ages_s=ages(),
            compared=books.newest,
            now_s=time.time(),
            names_tenants=names_tenants,
        )
    except BusError:
        page = render((), gateway, bus_up=False, ages_s=ages())
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


def _gateway_families(gateway: GatewayCounters, bus_up: bool, ages_s: Mapping[str, float]) -> Iterator[Metric]:
    yield GaugeMetricFamily("rubato_bus_up", "1 while this gateway reaches the Bus", value=int(bus_up))
    confirmed = GaugeMetricFamily(
        "rubato_confirmed_age_seconds", "Since this gateway last knew what is in force", labels=("what",)
    )
    for what, age_s in ages_s.items():
        confirmed.add_metric((what,), age_s)
    yield confirmed
    yield GaugeMetricFamily(
        "rubato_gateway_start_time_seconds", "When this gateway's counters began at 0", value=gateway.started_at_s
    )
    requests = CounterMetricFamily("rubato_http_requests", "Answers given on /v1", labels=("status", "class"))
    for labels, count in sorted(gateway.requests.items()):
        requests.add_metric(labels, count)
    yield requests
    downgrades = CounterMetricFamily(
        "rubato_downgraded_requests", "Let in, in a lower class than asked for", labels=("requested", "served")
    )
    for labels, count in sorted(gateway.downgrades.items()):
        downgrades.add_metric(labels, count)
    yield downgrades
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
