"""Every series of a worker, by its name and labels, and who is told of tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics
from gateway.loads import loads
from gateway.metrics import GatewayCounters, render
from gateway.worker_metrics import TenantNames
from scheduler_engine.policy import PriorityClass
from tests.gateway.metric_pages import a_load, histogram, samples, value
from tests.loads import quiet_class
from wire.snapshots import LoadSnapshot, PolicyNews, TenantSnapshot

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
    num_checkpoint_blocks=12,
    checkpoint_lag_blocks=4,
    num_blocks_saved_ahead_total=90,
    bytes_per_block=737_280,
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
    ("rubato_confirmed_age_seconds", {"what": "policy"}, 0.5),
    ("rubato_confirmed_age_seconds", {"what": "keys"}, 12),
    ("rubato_gateway_start_time_seconds", {}, 900),
    ("rubato_http_requests_total", {"status": "200", "class": "batch"}, 1),
    ("rubato_downgraded_requests_total", {"requested": "interactive", "served": "default"}, 1),
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
    ("rubato_checkpoint_blocks", WORKER, 12),
    ("rubato_checkpoint_bytes", WORKER, 12 * 737_280),
    ("rubato_checkpoint_lag_blocks", WORKER, 4),
    ("rubato_saved_ahead_blocks_total", WORKER, 90),
    ("rubato_saved_ahead_bytes_total", WORKER, 90 * 737_280),
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
    gateway.count_downgrade(PriorityClass.INTERACTIVE, PriorityClass.DEFAULT)
    ages_s = {"policy": 0.5, "keys": 12.0}
    return render([FULL], gateway, ages_s=ages_s, compared=COMPARED, now_s=1_000, **{"names_tenants": True, **changes})


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
