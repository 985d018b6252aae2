"""The page that Prometheus reads: what it tells, what it leaves out, and when it can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway import metrics
from gateway.metrics import GatewayCounters, render, respond
from scheduler_engine.policy import PriorityClass
from tests.gateway.metric_pages import a_load, histogram, of_batch, value
from wire.bus import BusError
from wire.snapshots import BoardRow, LoadSnapshot


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
