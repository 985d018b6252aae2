"""The board's tables as files: what an auditor gets of them, and who."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from gateway.console.consumers import LiveConsumer
from gateway.console.feed import LiveFeed
from gateway.loads import loads
from scheduler_engine.policy import PriorityClass
from tenants import services
from tests.loads import quiet_class, quiet_load
from wire.messages import BoardRow, Histogram, LoadSnapshot
from wire.snapshots import HISTOGRAM_BOUNDS_MS, TenantSnapshot

FIRST_TOKENS = Histogram(counts=(0, 0, 0, 10, *(0 for _ in HISTOGRAM_BOUNDS_MS[3:])), sum_us=1)
WORD = dict[str, Any]


@pytest.fixture
def aurora(transactional_db: None) -> str:
    return str(services.create_tenant(actor="tests", slug="aurora", name="=Aurora").id)


@pytest.fixture
def board(aurora: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker that served one request of Aurora's while somebody looked."""
    clock_us = 0
    row = BoardRow(
        response_id="01a22a1f-b0e9-7732-8111-000000000001",
        tenant_id=aurora,
        priority_class=PriorityClass.DEFAULT,
        state="decode",
        num_blocks=3,
        num_computed_tokens=40,
        num_output_tokens=8,
    )
    had = TenantSnapshot(tenant_id=aurora, gpu_us=(0, 2_000, 0), weight=1, num_live=1)
    said: list[LoadSnapshot] = [quiet_load(worker_id="worker-1", output_tokens_total=0)]

    async def read() -> Sequence[LoadSnapshot]:
        return said

    feed = LiveFeed(read, lambda: clock_us)
    monkeypatch.setattr(LiveConsumer, "feed", feed)
    loads.read_from(read)

    async def look() -> None:
        nonlocal clock_us
        await feed.frame_after(0)
        clock_us = 2_000_000
        classes = tuple(
            quiet_class(each, ttft=FIRST_TOKENS, num_running=1, preemptions=(("hold", "slots", 4),))
            for each in PriorityClass
        )
        said[0] = quiet_load(
            worker_id="worker-1", output_tokens_total=300, classes=classes, board=(row,), tenants=(had,)
        )

    asyncio.run(look())
    yield
    loads.read_from(None)


@pytest.fixture
def operator(transactional_db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_user("ops", password="a long enough one", is_staff=True))
    return client


def rows_of(client: Client, table: str) -> list[WORD]:
    answer = client.get(f"/operator/live/{table}.csv")
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    assert f'filename="board-{table}-' in answer["Content-Disposition"]
    return list(csv.DictReader(io.StringIO(answer.content.decode())))


def test_rates_and_quantiles_are_numbers_with_their_units(board: None, operator: Client) -> None:
    (worker,) = rows_of(operator, "workers")
    assert (worker["worker"], worker["age_ms"], worker["output_per_s"]) == ("worker-1", "0", "150.0")
    interactive, default, batch = rows_of(operator, "classes")
    assert (interactive["class"], default["class"], batch["class"]) == ("interactive", "default", "batch")
    assert {one["recent_ms"] for one in (worker, default)} == {"2000"}  # somebody began to look two seconds ago
    assert float(default["ttft_p50_ms"]) < float(default["ttft_p99_ms"]) <= HISTOGRAM_BOUNDS_MS[3]
    assert default["queue_wait_p50_ms"] == ""  # nothing was counted
    assert (default["gave_way_by_hold"], default["gave_way_by_swap"]) == ("4", "0")


def test_tenants_and_requests_have_names_that_no_spreadsheet_takes_for_a_formula(
    board: None, operator: Client, aurora: str
) -> None:
    (tenant,) = rows_of(operator, "tenants")
    assert (tenant["tenant"], tenant["name"], tenant["share_percent"]) == (aurora, "'=Aurora", "100.0")
    (request,) = rows_of(operator, "requests")
    assert (request["name"], request["class"], request["state"]) == ("'=Aurora", "default", "decode")
    assert (request["blocks"], request["computed_tokens"], request["output_tokens"]) == ("3", "40", "8")


def test_a_table_that_is_none_is_not_found_and_who_is_no_operator_is_led_to_the_log_in(
    board: None, operator: Client
) -> None:
    assert operator.get("/operator/live/passwords.csv").status_code == 404
    assert Client().get("/operator/live/classes.csv").status_code == 302


def test_the_board_links_to_each_of_its_tables(board: None, operator: Client) -> None:
    page = operator.get("/operator/live").content.decode()
    for table in ("workers", "classes", "tenants", "requests"):
        assert f'href="/operator/live/{table}.csv"' in page
