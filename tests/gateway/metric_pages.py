"""A worker whose page Prometheus reads, and what it would store of it."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayCounters, render
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.snapshots import HISTOGRAM_BOUNDS_MS, Histogram, LoadSnapshot


def histogram(**counts_by_bound: int) -> Histogram:
    """``histogram(le_50=2, rest=1)``: two in the 50 ms bucket, one above the last bound."""
    bounds = [f"le_{bound}" for bound in HISTOGRAM_BOUNDS_MS] + ["rest"]
    return Histogram(counts=tuple(counts_by_bound.get(bound, 0) for bound in bounds), sum_us=1_500_000)


def a_load(batch: dict[str, Any] | None = None, **changes: Any) -> LoadSnapshot:
    """A worker in the middle of its work, whose histograms have a sum."""
    times = {"queue_wait": histogram(), "ttft": histogram()}
    fields: dict[str, Any] = {
        "epoch": 4,
        "model": "smollm2",
        "last_step_age_us": 250_000,
        "step": 77,
        "num_free_blocks": 30,
        "num_host_blocks": 50,
        "num_free_host_blocks": 50,
        "num_free_slots": 2,
        "policy_version": 3,
        "busy_us_total": 2_500_000,
        "classes": (
            quiet_class(PriorityClass.INTERACTIVE, **times),
            quiet_class(PriorityClass.DEFAULT, **times),
            quiet_class(PriorityClass.BATCH, **{**times, **(batch or {})}),
        ),
    }
    return quiet_load(**{**fields, **changes})


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a Prometheus server would store."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def value(page: bytes, name: str, **labels: str) -> float | None:
    return samples(page).get((name, frozenset(labels.items())))


def of_batch(load: LoadSnapshot, name: str, **labels: str) -> float | None:
    page = render([load], GatewayCounters())
    return value(page, name, worker="worker-1", **{"class": "batch", **labels})
