"""Engine, gate, ledger and roll-ups side by side, on a real Valkey and a real PostgreSQL."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from billing import engine_counts, selectors
from billing.engine_counts import EngineTotals
from billing.models import LedgerEntry, Rollup, UsageRequest
from billing.pricing import FREE, Terminal, TokenCounts, charge_micros
from gateway.gate import Gate
from gateway.reconciliation import look
from wire.messages import Released


def test_after_a_drain_all_four_sides_agree(floor: Any, settle: Callable[[], None], gate: Gate) -> None:  # P31
    floor.busy_hour(random.Random(1), 60)
    settle()
    found = look(gate)
    assert found.differences() == dict.fromkeys(found.differences(), 0)
    assert found.is_right
    assert found.engine.output_tokens == floor.output_tokens > 0
    assert found.gate.settled_micros == found.ledger_money.settled_micros > 0


def test_the_bus_and_the_books_charge_the_same_to_the_last_micro_unit(floor: Any, settle: Callable[[], None]) -> None:
    rng = random.Random(2)
    expected = {}
    for number in range(200):
        response_id = str(uuid.UUID(int=number + 1))
        prompt = rng.choice([1, 7, 131_072])
        counts = TokenCounts(prompt=prompt, cached=rng.randrange(prompt + 1), output=rng.randrange(10_000))
        terminal = rng.choice(list(Terminal))
        expected[response_id] = charge_micros(terminal, counts, floor.prices_of_default)
        floor.reserve(response_id, money_micros=50_000)
        floor.finish(response_id, counts, terminal)
    settle()
    on_the_bus = {name: int(floor.client.hget(floor.keys.response(name), "cost_micros") or -1) for name in expected}
    in_the_books = {str(row.id): row.cost_micros for row in UsageRequest.objects.all()}
    assert on_the_bus == expected
    assert in_the_books == expected


def test_an_open_reservation_stands_on_both_sides(floor: Any, settle: Callable[[], None], gate: Gate) -> None:
    floor.reserve(str(uuid.UUID(int=1)))
    settle()
    found = look(gate)
    assert found.gate.open_micros == found.ledger_money.open_micros == 1_000
    assert found.is_right


def test_an_orphan_ended_at_the_gate_gives_its_money_back_on_both_sides(
    floor: Any, settle: Callable[[], None], gate: Gate
) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    gate.end(Released(response_id=response_id, tenant_id=floor.tenant_id, reason="expired"))
    settle()
    found = look(gate)
    assert (found.gate.open_micros, found.ledger_money.open_micros) == (0, 0)
    assert UsageRequest.objects.get().state == "expired"


def test_the_gate_knows_records_and_living_gateways(floor: Any, gate: Gate) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.client.set(floor.keys.alive("gateway-1"), 1, px=15_000)
    records = gate.records([response_id, str(uuid.UUID(int=2))])
    assert {name: record.state for name, record in records.items()} == {response_id: "open"}
    assert gate.live_gateways(["gateway-1", "gateway-2"]) == {"gateway-1"}


def test_usage_that_waits_in_the_stream_is_said_to_be_undrained(floor: Any, gate: Gate) -> None:
    floor.busy_hour(random.Random(3), 3)
    found = look(gate)
    assert (found.num_waiting_usages, found.is_drained, found.is_right) == (6, False, False)


def test_tokens_that_a_worker_never_committed_are_asked_of_nobody(
    floor: Any, settle: Callable[[], None], gate: Gate
) -> None:
    floor.busy_hour(random.Random(7), 5)
    floor.worker.open()  # killed and started again: a new epoch, counting from 0
    floor.busy_hour(random.Random(8), 5)
    settle()
    assert look(gate).is_right
    assert len(gate.counted()) == 2


def test_a_response_given_up_while_its_worker_started_anew_is_rework_on_every_side(
    floor: Any, settle: Callable[[], None], gate: Gate
) -> None:
    """Its Submit came just after the new epoch had emptied the inbox; the gateway saw another epoch and gave up."""
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.worker.open()
    gate.end(Released(response_id=response_id, tenant_id=floor.tenant_id, reason="worker_lost"))
    floor.finish(response_id, TokenCounts(prompt=100, output=7), Terminal.CANCELLED_ADMIN)
    settle()
    found = look(gate)
    assert found.is_right
    assert (found.rework.prompt_tokens, found.rework.output_tokens) == (100, 7)
    assert (found.engine.output_tokens, found.num_open_alerts) == (0, 0)
    assert (found.gate.open_micros, found.gate.settled_micros) == (0, 0)
    assert UsageRequest.objects.get().state == "released"


def test_a_response_given_up_just_after_its_worker_ended_it_is_charged_once(
    floor: Any, settle: Callable[[], None], gate: Gate
) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.finish(response_id, TokenCounts(prompt=100, output=7))
    gate.end(Released(response_id=response_id, tenant_id=floor.tenant_id, reason="worker_lost"))
    settle()
    found = look(gate)
    assert found.is_right
    assert (found.rework.output_tokens, found.engine.output_tokens, found.num_open_alerts) == (0, 7, 0)
    assert UsageRequest.objects.get().state == "completed"


def test_totals_of_an_earlier_epoch_stay_counted(world: Any) -> None:
    engine_counts.keep([EngineTotals("worker-1", 7, 100, 50)])
    engine_counts.keep([EngineTotals("worker-1", 8, 10, 5, 3, 2), EngineTotals("worker-1", 7, 90, 40)])
    engine_counts.keep([EngineTotals("worker-1", 8, 10, 5, 1, 1)])
    assert selectors.engine_sums() == (110, 55)
    assert selectors.rework_sums() == (3, 2)


@pytest.mark.parametrize("tampering", ["rollup", "gate", "engine"])
def test_a_difference_on_any_side_is_shown_and_ends_the_command_with_1(
    floor: Any, settle: Callable[[], None], tampering: str
) -> None:
    floor.busy_hour(random.Random(4), 10)
    settle()
    match tampering:
        case "rollup":
            Rollup.objects.update(output_tokens=1)
        case "gate":
            floor.client.hincrby(floor.window, "settled", 1)
        case "engine":
            floor.client.hincrby(floor.keys.counted("worker-1"), f"{floor.epoch}:output", 1)
    output = StringIO()
    with pytest.raises(CommandError, match="the books differ") as refusal:
        call_command("reconcile", "--json", "--drain-s=0", stdout=output)
    assert refusal.value.returncode == 1
    assert any(json.loads(output.getvalue())["differences"].values())


def test_the_table_says_that_there_are_no_differences(floor: Any, settle: Callable[[], None]) -> None:
    floor.busy_hour(random.Random(5), 5)
    settle()
    output = StringIO()
    call_command("reconcile", "--drain-s=0", stdout=output)
    assert "no differences" in output.getvalue()
    assert str(floor.output_tokens) in output.getvalue()


def test_the_settler_process_books_what_comes_and_ends_cleanly_on_sigterm(
    floor: Any, service_environment: dict[str, str], project_root: Path
) -> None:
    floor.price_version, floor.prices = 0, FREE
    environment = {**service_environment, "RUBATO_REDIS_PREFIX": floor.keys.prefix}
    command = [sys.executable, "manage.py", "settle_usage"]
    process = subprocess.Popen(command, cwd=project_root, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
        floor.busy_hour(random.Random(6), 20)
        call_command("reconcile", "--drain-s=20", stdout=StringIO())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert "num_reserved=20" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    assert LedgerEntry.objects.count() == 40
