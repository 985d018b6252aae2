"""The board's numbers as CSV: what a frame shows of all workers, one row each, with the age of what the worker said and
how far back its recent numbers reach: a minute, or since somebody began to look.

Knows frames and columns; refuses to know pages. Units are in the columns' names.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from billing.documents import plain
from gateway.console.frames import QUANTILES, Frame

Rows = Iterator[dict[str, Any]]


def text(frame: Frame, table: str, names: Mapping[str, str]) -> str:
    """``table``: a name in TABLES. ``names``: tenants' names by id."""
    columns, rows = TABLES[table]
    out = io.StringIO()
    writer: Any = csv.writer(out)
    writer.writerow(["worker", "age_ms", "recent_ms", *columns])
    for worker in frame["workers"]:
        for row in rows(worker, names):
            of_worker = plain(worker["id"]), worker["age_ms"], worker["recent_ms"]
            writer.writerow([*of_worker, *(plain(row[column]) for column in columns)])
    return out.getvalue()


def _workers(worker: Frame, _: Mapping[str, str]) -> Rows:
    parts = {f"{part}_{of}": worker[part][of] for part in ("slots", "device", "host") for of in ("used", "total")}
    yield {**worker, **worker["policy"], **parts}


def _classes(worker: Frame, _: Mapping[str, str]) -> Rows:
    for one in worker["classes"]:
        latencies = {}
        for name in LATENCIES:
            for percent, value_ms in zip(QUANTILES, one[name]["recent_ms"], strict=True):
                latencies[f"{name}_p{percent}_ms"] = value_ms
            latencies[f"{name}_target_ms"] = one[name]["target_ms"]
        kept, broken = one["promises"]
        gave_way = {f"gave_way_by_{lever}": one["preemptions"].get(lever, 0) for lever in LEVERS}
        shed = sum(one["shed"].values())
        yield {**one, **latencies, **gave_way, "shed": shed, "promises_kept": kept, "promises_broken": broken}


def _tenants(worker: Frame, names: Mapping[str, str]) -> Rows:
    for tenant, live, recent_ms, share, entitled, all_ms in worker["tenants"]:
        name = names.get(tenant, "") if tenant else "all others"
        yield dict(zip(TENANT, (tenant, name, live, recent_ms, share, entitled, all_ms), strict=True))


def _requests(worker: Frame, names: Mapping[str, str]) -> Rows:
    for response, tenant, label, state, blocks, computed, output in worker["board"]:
        row = (response, tenant, names.get(tenant, ""), label, state, blocks, computed, output)
        yield dict(zip(REQUEST, row, strict=True))


LATENCIES = ("queue_wait", "ttft", "tpot")
LEVERS = ("hold", "swap", "recompute")
WORKER = (
    *("epoch", "model", "version", "state", "up_ms", "step", "step_age_ms", "policy_version"),
    *("output_per_s", "prompt_per_s", "busy_percent"),
    *("slots_used", "slots_total", "device_used", "device_total", "host_used", "host_total"),
    *("rung", "batch_paused_ms", "batch_pauses", "switching_percent", "governor_cuts"),
)
CLASS = (
    *("class", "waiting", "running", "suspended", "closed", "output_per_s"),
    *(f"{name}_{of}_ms" for name in LATENCIES for of in (*(f"p{percent}" for percent in QUANTILES), "target")),
    *(f"gave_way_by_{lever}" for lever in LEVERS),
    *("shed", "floor_debt_ms", "promises_kept", "promises_broken", "gap_ms", "gap_bound_ms"),
)
TENANT = (
    *("tenant", "name", "live", "device_ms_recently", "share_percent", "entitled_percent"),
    "device_ms_in_all",
)
REQUEST = ("response", "tenant", "name", "class", "state", "blocks", "computed_tokens", "output_tokens")
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Frame, Mapping[str, str]], Rows]]] = {
    "workers": (WORKER, _workers),
    "classes": (CLASS, _classes),
    "tenants": (TENANT, _tenants),
    "requests": (REQUEST, _requests),
}
