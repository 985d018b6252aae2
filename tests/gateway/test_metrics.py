"""The page that Prometheus reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics
from gateway.loads import loads
from gateway.metrics import GatewayCounters, render, respond
from gateway.worker_metrics import TenantNames
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.bus import BusError
from wire.snapshots import (
    HISTOGRAM_BOUNDS_MS,
    BoardRow,
    Histogram,
    LoadSnapshot,
    PolicyNews,
    TenantSnapshot,
)


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


@pytest.mark.parametrize(("state", "count"), [("waiting", 60), ("running", 6), ("suspended", 2)])
def test_requests_are_told_by_class_and_state(state: str, count: int) -> None:
    load = a_load({"num_waiting": 60, "num_running": 6, "num_suspended": 2})

    assert of_batch(load, "rubato_requests", state=state) == count


def test_preemptions_are_told_by_lever_and_resource() -> None:
    load = a_load({"preemptions": (("hold", "slots", 5), ("swap", "memory", 2))})

    assert of_batch(load, "rubato_preemptions_total", lever="hold", resource="slots") == 5
    assert of_batch(load, "rubato_preemptions_total", lever="swap", resource="memory") == 2


def test_words_of_a_newer_worker_add_up_under_other() -> None:
    load = a_load({"preemptions": (("teleport", "luck", 1), ("clone", "luck", 2)), "shed": (("bored", 3), ("sad", 4))})

    assert of_batch(load, "rubato_preemptions_total", lever="other", resource="other") == 3
    assert of_batch(load, "rubato_shed_total", reason="other") == 7


def test_buckets_are_cumulative_and_in_seconds() -> None:
    load = a_load({"ttft": histogram(le_50=2, le_1000=3, rest=1)})

    name = "gen_ai_server_time_to_first_token_seconds"
    model = {"gen_ai_request_model": "smollm2"}
    assert of_batch(load, f"{name}_bucket", le="0.025", **model) == 0
    assert of_batch(load, f"{name}_bucket", le="0.05", **model) == 2
    assert of_batch(load, f"{name}_bucket", le="1.0", **model) == 5
    assert of_batch(load, f"{name}_bucket", le="+Inf", **model) == 6
    assert of_batch(load, f"{name}_count", **model) == 6
    assert of_batch(load, f"{name}_sum", **model) == 1.5


def test_queue_wait_is_not_told_as_time_to_first_token() -> None:
    load = a_load({"queue_wait": histogram(le_5=9), "ttft": histogram(le_5=1)})

    assert of_batch(load, "rubato_queue_wait_seconds_count", gen_ai_request_model="smollm2") == 9


def test_blocks_are_told_by_pool_and_use() -> None:
    page = render([a_load()], GatewayCounters())

    assert value(page, "rubato_kv_blocks", worker="worker-1", pool="device", state="used") == 70
    assert value(page, "rubato_kv_blocks", worker="worker-1", pool="host", state="free") == 50


def test_a_draining_worker_is_not_ready() -> None:
    page = render([a_load(draining=True)], GatewayCounters())

    assert value(page, "rubato_worker_ready", worker="worker-1") == 0


def test_two_workers_stand_side_by_side() -> None:
    page = render([a_load(), a_load(worker_id="worker-2", step=5)], GatewayCounters())

    assert value(page, "rubato_steps_total", worker="worker-1") == 77
    assert value(page, "rubato_steps_total", worker="worker-2") == 5


def test_nothing_of_a_tenant_or_a_response_is_told() -> None:
    row = BoardRow(
        response_id="019a-secret",
        tenant_id="tenant-aurora",
        priority_class=PriorityClass.BATCH,
        state="decode",
        num_blocks=1,
        num_computed_tokens=1,
        num_output_tokens=1,
    )

    page = render([a_load(board=(row,))], GatewayCounters())

    assert b"019a-secret" not in page
    assert b"aurora" not in page


def test_answers_are_counted_by_status_and_class() -> None:
    gateway = GatewayCounters()
    gateway.count_request(200, PriorityClass.INTERACTIVE)
    gateway.count_request(200, PriorityClass.INTERACTIVE)
    gateway.count_request(401, None)

    page = render([], gateway)

    assert value(page, "rubato_http_requests_total", status="200", **{"class": "interactive"}) == 2
    assert value(page, "rubato_http_requests_total", status="401", **{"class": "none"}) == 1


def test_a_status_that_is_none_does_not_widen_the_labels() -> None:
    gateway = GatewayCounters()
    gateway.count_request(1_000, None)
    gateway.count_request(0, None)

    assert value(render([], gateway), "rubato_http_requests_total", status="other", **{"class": "none"}) == 2


def test_a_stream_is_open_until_it_ends_however_it_ends() -> None:
    gateway = GatewayCounters()

    def write_until_the_client_leaves() -> None:
        with gateway.open_stream("sse"):
            assert value(render([], gateway), "rubato_streams_open", kind="sse") == 1
            raise ConnectionError

    with pytest.raises(ConnectionError):
        write_until_the_client_leaves()
    assert value(render([], gateway), "rubato_streams_open", kind="sse") == 0


async def scrape(method: str, read_loads: Any) -> tuple[dict[str, Any], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await respond(method, send, read_loads, GatewayCounters())
    return sent[0], sent[1]["body"]


async def one_load() -> Sequence[LoadSnapshot]:
    return [a_load()]


async def no_bus() -> Sequence[LoadSnapshot]:
    raise BusError("connection refused")


async def test_a_scrape_reads_the_newest_snapshots() -> None:
    start, body = await scrape("GET", one_load)

    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/plain; version=0.0.4")
    assert value(body, "rubato_bus_up") == 1
    assert value(body, "rubato_slots_free", worker="worker-1") == 2


async def test_a_scrape_succeeds_while_the_bus_is_down() -> None:
    start, body = await scrape("GET", no_bus)

    assert start["status"] == 200
    assert value(body, "rubato_bus_up") == 0
    assert value(body, "rubato_slots_free", worker="worker-1") is None


async def test_only_reading_is_allowed() -> None:
    start, body = await scrape("POST", one_load)

    assert start["status"] == 405
    assert dict(start["headers"])[b"allow"] == b"GET, HEAD"
    assert body == b""


async def test_without_a_runtime_the_mounted_app_says_that_the_bus_is_down() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await metrics.application({"type": "http", "method": "GET", "path": "/metrics"}, None, send)

    assert value(sent[1]["body"], "rubato_bus_up") == 0


def test_what_the_settler_found_in_the_books_is_shown_with_its_age() -> None:
    compared = {
        "at": "2026-11-29T12:00:00+00:00",
        "engine_ledger_prompt_tokens": 0,
        "engine_ledger_output_tokens": 3,
        "wrong_rollups": 0,
        "num_waiting": 7,
        "num_open_alerts": 1,
    }
    page = metrics.render((), metrics.GatewayCounters(), compared=compared, now_s=1_795_953_630.0).decode()
    assert 'rubato_reconcile_difference_tokens{kind="output"} 3.0' in page
    assert "rubato_usage_waiting 7.0" in page
    assert "rubato_reconcile_age_seconds 30.0" in page


def test_where_the_books_were_never_compared_nothing_is_said_of_them() -> None:
    assert "reconcile" not in metrics.render((), metrics.GatewayCounters()).decode()


FULL = a_load(
    {
        "num_waiting": 60,
        "num_running": 6,
        "num_suspended": 2,
        "waiting_gpu_us": 7_000_000,
        "estimated_start_q50_us": 1_000_000,
        "estimated_start_q90_us": 4_000_000,
        "closed": True,
        "prompt_tokens": 11,
        "output_tokens": 12,
        "queue_wait": histogram(le_5=1),
        "ttft": histogram(le_5=2),
        "tpot": histogram(le_5=3),
        "duration": histogram(le_5=4),
        "preemptions": (("hold", "slots", 5),),
        "shed": (("late", 4),),
        "ttft_target_us": 300_000,
        "tpot_target_us": 50_000,
        "floor_debt_us": 1_500_000,
        "slot_cap": 7,
        "reserve_blocks": 13,
        "num_promises_kept": 9,
        "num_promises_broken": 1,
        "fairness_gap_us": 800_000,
        "fairness_bound_us": 2_500_000,
        "recomputed_tokens": 21,
        "swapped_bytes": 4_096,
    },
    version="0.1.0",
    epoch_age_us=40_000_000,
    scheduling_us_total=250_000,
    num_empty_steps=3,
    policy=PolicyNews(
        rung="batch_paused",
        batch_paused_us=12_000_000,
        num_batch_pauses=2,
        switching_per_mille=61,
        num_governor_cuts=5,
        num_bypasses=6,
        num_relegations=7,
        num_kept_out=8,
        num_rests=9,
        sheds=(("batch", "batch_paused", "class_closed", 4),),
        preemptions=(("batch", "interactive", "memory", "swap", 3), ("batch", "", "failure", "recompute", 1)),
    ),
    tenants=(
        TenantSnapshot(tenant_id="aurora", gpu_us=(1_000_000, 0, 500_000), weight=3, num_live=2),
        TenantSnapshot(tenant_id="nova", gpu_us=(0, 0, 2_000_000), weight=1, num_live=1),
    ),
)
BATCH = {"worker": "worker-1", "class": "batch"}
WORKER = {"worker": "worker-1"}
MODEL = {**BATCH, "gen_ai_request_model": "smollm2"}
SERIES: list[tuple[str, dict[str, str], float]] = [
    ("rubato_bus_up", {}, 1),
    ("rubato_gateway_start_time_seconds", {}, 900),
    ("rubato_http_requests_total", {"status": "200", "class": "batch"}, 1),
    ("rubato_streams_open", {"kind": "sse"}, 0),
    ("rubato_reconcile_difference_tokens", {"kind": "output"}, 3),
    ("rubato_reconcile_wrong_rollups", {}, 0),
    ("rubato_usage_waiting", {}, 7),
    ("rubato_ledger_alerts_open", {}, 1),
    ("rubato_reconcile_age_seconds", {}, 30),
    ("rubato_worker_ready", WORKER, 1),
    ("rubato_worker_epoch", WORKER, 4),
    ("rubato_worker_info", {**WORKER, "version": "0.1.0", "model": "smollm2"}, 1),
    ("rubato_worker_start_time_seconds", WORKER, 960),
    ("rubato_slots", WORKER, 8),
    ("rubato_slots_free", WORKER, 2),
    ("rubato_policy_version", WORKER, 3),
    ("rubato_last_step_age_seconds", WORKER, 0.25),
    ("rubato_switching_ratio", WORKER, 0.061),
    ("rubato_kv_blocks", {**WORKER, "pool": "device", "state": "used"}, 70),
    ("rubato_steps_total", WORKER, 77),
    ("rubato_empty_steps_total", WORKER, 3),
    ("rubato_busy_seconds_total", WORKER, 2.5),
    ("rubato_scheduler_seconds_total", WORKER, 0.25),
    ("rubato_batch_paused_seconds_total", WORKER, 12),
    ("rubato_batch_pauses_total", WORKER, 2),
    ("rubato_governor_cuts_total", WORKER, 5),
    ("rubato_bypasses_total", WORKER, 6),
    ("rubato_relegations_total", WORKER, 7),
    ("rubato_kept_out_total", WORKER, 8),
    ("rubato_rests_total", WORKER, 9),
    ("rubato_shedding_rung", {**WORKER, "rung": "batch_paused"}, 1),
    ("rubato_shedding_rung", {**WORKER, "rung": "calm"}, 0),
    ("rubato_shed_by_rung_total", {**BATCH, "rung": "batch_paused", "reason": "class_closed"}, 4),
    (
        "rubato_preemptions_by_class_total",
        {**BATCH, "by_class": "interactive", "lever": "swap", "resource": "memory"},
        3,
    ),
    (
        "rubato_preemptions_by_class_total",
        {**BATCH, "by_class": "none", "lever": "recompute", "resource": "failure"},
        1,
    ),
    ("rubato_requests", {**BATCH, "state": "waiting"}, 60),
    ("rubato_estimated_start_seconds", {**BATCH, "quantile": "0.9"}, 4),
    ("rubato_target_seconds", {**BATCH, "target": "ttft"}, 0.3),
    ("rubato_target_seconds", {**BATCH, "target": "tpot"}, 0.05),
    ("rubato_waiting_gpu_seconds", BATCH, 7),
    ("rubato_class_closed", BATCH, 1),
    ("rubato_floor_debt_seconds", BATCH, 1.5),
    ("rubato_slot_cap", BATCH, 7),
    ("rubato_reserve_blocks", BATCH, 13),
    ("rubato_fairness_gap_seconds", BATCH, 0.8),
    ("rubato_fairness_gap_bound_seconds", BATCH, 2.5),
    ("rubato_tokens_total", {**BATCH, "kind": "output"}, 12),
    ("rubato_preemptions_total", {**BATCH, "lever": "hold", "resource": "slots"}, 5),
    ("rubato_shed_total", {**BATCH, "reason": "late"}, 4),
    ("rubato_retry_promises_total", {**BATCH, "outcome": "kept"}, 9),
    ("rubato_retry_promises_total", {**BATCH, "outcome": "broken"}, 1),
    ("rubato_recomputed_tokens_total", BATCH, 21),
    ("rubato_swapped_bytes_total", BATCH, 4_096),
    ("rubato_queue_wait_seconds_count", MODEL, 1),
    ("gen_ai_server_time_to_first_token_seconds_count", MODEL, 2),
    ("gen_ai_server_time_per_output_token_seconds_count", MODEL, 3),
    ("gen_ai_server_request_duration_seconds_count", MODEL, 4),
    ("rubato_gpu_seconds_total", BATCH, 2.5),
    ("rubato_tenant_gpu_seconds_total", {**BATCH, "tenant": "nova"}, 2),
    ("rubato_tenant_gpu_seconds_total", {**WORKER, "class": "interactive", "tenant": "aurora"}, 1),
    ("rubato_tenant_weight", {**WORKER, "tenant": "aurora"}, 3),
]
COMPARED = {
    "at": "1970-01-01T00:16:10+00:00",
    "engine_ledger_prompt_tokens": 0,
    "engine_ledger_output_tokens": 3,
    "wrong_rollups": 0,
    "num_waiting": 7,
    "num_open_alerts": 1,
}


def full_page(**changes: Any) -> bytes:
    gateway = GatewayCounters(started_at_s=900)
    gateway.count_request(200, PriorityClass.BATCH)
    return render([FULL], gateway, compared=COMPARED, now_s=1_000, **{"names_tenants": True, **changes})


@pytest.mark.parametrize(("name", "labels", "expected"), SERIES, ids=lambda part: part if isinstance(part, str) else "")
def test_each_series_carries_what_the_worker_said(name: str, labels: dict[str, str], expected: float) -> None:
    """S161: every reason and every lever has a series of its own."""
    assert value(full_page(), name, **labels) == expected


def test_no_series_is_left_untested() -> None:
    exported = {family.name for family in text_string_to_metric_families(full_page().decode())}
    tested = {name.removesuffix("_total").removesuffix("_count") for name, _, _ in SERIES}

    assert exported == tested


def test_histograms_of_the_classes_sum_to_the_total() -> None:
    """S160."""
    each = {
        priority_class: quiet_class(priority_class, ttft=histogram(le_50=2, rest=1)) for priority_class in PriorityClass
    }
    page = samples(render([a_load(classes=tuple(each.values()))], GatewayCounters()))
    counts = [n for (name, _), n in page.items() if name == "gen_ai_server_time_to_first_token_seconds_count"]

    assert counts == [3, 3, 3]


def test_without_the_token_no_tenant_is_named() -> None:
    page = full_page(names_tenants=False)

    assert b"aurora" not in page
    assert b"tenant" not in page.replace(b"of tenants that wait", b"").replace(b"tenants with less", b"")
    assert value(page, "rubato_gpu_seconds_total", **BATCH) == 2.5


def test_tenants_beyond_the_bound_are_one_series() -> None:
    gateway = GatewayCounters(tenant_names=TenantNames(most=1))

    page = render([FULL], gateway, names_tenants=True)

    assert value(page, "rubato_tenant_gpu_seconds_total", tenant="aurora", **BATCH) == 0.5
    assert value(page, "rubato_tenant_gpu_seconds_total", tenant="other", **BATCH) == 2
    assert b"nova" not in page


@pytest.mark.parametrize(
    ("given", "is_named"), [(b"Bearer swordfish", True), (b"Bearer sword", False), (b"", False), (b"swordfish", False)]
)
async def test_tenants_are_named_to_who_brings_the_token(settings: Any, given: bytes, is_named: bool) -> None:
    settings.RUBATO_METRICS_TOKEN = "swordfish"
    loads.read_from(full_load)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"authorization", given)]}
    await metrics.application(scope, None, send)
    loads.read_from(None)

    assert (b"aurora" in sent[1]["body"]) is is_named


async def test_without_a_token_in_the_settings_nobody_is_told_of_tenants() -> None:
    assert not metrics._brings_token({"headers": [(b"authorization", b"Bearer ")]})


async def full_load() -> Sequence[LoadSnapshot]:
    return [FULL]


def test_counters_survive_nothing_and_say_so() -> None:  # P34
    """P34: a dashboard that sees the start time move knows why a counter fell."""
    before = render([FULL], GatewayCounters(), now_s=1_000)
    after = render([a_load(epoch=5, epoch_age_us=1_000_000)], GatewayCounters(), now_s=1_010)

    assert value(before, "rubato_worker_start_time_seconds", **WORKER) == 960
    assert value(after, "rubato_worker_start_time_seconds", **WORKER) == 1_009
    assert value(after, "rubato_worker_epoch", **WORKER) == 5
