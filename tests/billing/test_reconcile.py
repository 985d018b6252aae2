"""Engine, gate, ledger and roll-ups side by side, on a real Valkey and a real PostgreSQL."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command

from billing import engine_counts, selectors
from billing.engine_counts import EngineTotals
from billing.models import LedgerEntry, Rollup, UsageRequest
from billing.pricing import FREE, Terminal, TokenCounts, TokenPrices, charge_micros
from gateway.gate import Gate
from gateway.reconciliation import look
from gateway.settler import Settler
from scheduler_engine.policy import PriorityClass
from wire import codec
from wire.bus import StepOutput
from wire.messages import EngineCounters, Released, Reserved, Usage
from wire.redis_bus import RedisUsageReader, RedisWorkerBus
from wire.redis_keys import Keys

KEYS = Keys("books-test:")
TENANT = str(uuid.uuid5(uuid.NAMESPACE_DNS, "aurora"))
MODEL = "smollm2-135m-instruct"
PRICES = TokenPrices(prompt=150_000, cached=75_000, output=600_000)
WINDOW = f"{KEYS.prefix}money:{TENANT}:default:2026-11"


class Floor:
    """A worker on the real Bus, and a door that reserves as the admit script does."""

    def __init__(self, url: str, price_version: int, prices: TokenPrices = PRICES) -> None:
        self.client = redis.Redis.from_url(url)
        self.worker = RedisWorkerBus(url, "worker-1", keys=KEYS)
        self.epoch = self.worker.open()
        self.price_version = price_version
        self.prices = prices
        self.prompt_tokens = self.output_tokens = 0

    def reserve(self, response_id: str, money_micros: int = 1_000) -> None:
        self.client.hset(
            KEYS.response(response_id),
            mapping={
                "state": "open",
                "gateway": "gateway-1",
                "worker": "worker-1",
                "attempt": "1",
                "money_keys": json.dumps([WINDOW]),
                "money_reserved": money_micros,
                "price_prompt": self.prices.prompt,
                "price_cached": self.prices.cached,
                "price_output": self.prices.output,
            },
        )
        self.client.hincrby(WINDOW, "open", money_micros)
        self.client.hsetnx(WINDOW, "settled", 0)
        message = Reserved(
            response_id=response_id, source="rest", money_micros=money_micros, reserved_tokens=9, window_id="2026-11",
            **self._same(),
        )  # fmt: skip
        self.client.xadd(KEYS.usage, {"m": codec.encode([message])})

    def finish(self, response_id: str, counts: TokenCounts, terminal: Terminal = Terminal.COMPLETED) -> None:
        self.prompt_tokens += counts.prompt
        self.output_tokens += counts.output
        message = Usage(
            response_id=response_id, attempt=1, prompt_tokens=counts.prompt, cached_tokens=counts.cached,
            output_tokens=counts.output, terminal=terminal.value, counters=EngineCounters(), **self._same(),
        )  # fmt: skip
        self.worker.publish(StepOutput(usages=[message]))

    def _same(self) -> dict[str, Any]:
        return {
            "tenant_id": TENANT,
            "project_id": str(uuid.UUID(int=1)),
            "key_id": str(uuid.UUID(int=2)),
            "priority_class": PriorityClass.DEFAULT,
            "model": MODEL,
            "policy_version": 1,
            "price_version": self.price_version,
        }


@pytest.fixture
def floor(world: Any, valkey: str, settings: Any) -> Iterator[Floor]:
    settings.RUBATO_REDIS_PREFIX = KEYS.prefix
    floor = Floor(valkey, world.price_version)
    yield floor
    floor.worker.close()
    floor.client.close()


@pytest.fixture
def settle(floor: Floor, valkey: str) -> Iterator[Callable[[], None]]:
    reader = RedisUsageReader(valkey, keys=KEYS)
    settler = Settler(reader, clock_s=lambda: 0.0, stopped_after=lambda seconds: True)

    def run() -> None:
        while settler.settle_some():
            pass

    yield run
    reader.close()


@pytest.fixture
def gate(floor: Floor, valkey: str) -> Iterator[Gate]:
    with Gate(valkey, KEYS) as gate:
        yield gate


def busy_hour(floor: Floor, rng: random.Random, number: int) -> None:
    """Calls of every kind of end."""
    for _ in range(number):
        response_id = str(uuid.UUID(int=rng.getrandbits(128)))
        floor.reserve(response_id)
        prompt = rng.randrange(1, 500)
        counts = TokenCounts(prompt=prompt, cached=rng.randrange(prompt), output=rng.randrange(500))
        floor.finish(response_id, counts, rng.choice(list(Terminal)))


def test_after_a_drain_all_four_sides_agree(floor: Floor, settle: Callable[[], None], gate: Gate) -> None:
    busy_hour(floor, random.Random(1), 60)
    settle()
    found = look(gate)
    assert found.differences() == dict.fromkeys(found.differences(), 0)
    assert found.is_right
    assert found.engine.output_tokens == floor.output_tokens > 0
    assert found.gate.settled_micros == found.ledger_money.settled_micros > 0


def test_the_bus_and_the_books_charge_the_same_to_the_last_micro_unit(floor: Floor, settle: Callable[[], None]) -> None:
    rng = random.Random(2)
    expected = {}
    for number in range(200):
        response_id = str(uuid.UUID(int=number + 1))
        prompt = rng.choice([1, 7, 131_072])
        counts = TokenCounts(prompt=prompt, cached=rng.randrange(prompt + 1), output=rng.randrange(10_000))
        terminal = rng.choice(list(Terminal))
        expected[response_id] = charge_micros(terminal, counts, PRICES)
        floor.reserve(response_id, money_micros=50_000)
        floor.finish(response_id, counts, terminal)
    settle()
    on_the_bus = {name: int(floor.client.hget(KEYS.response(name), "cost_micros") or -1) for name in expected}
    in_the_books = {str(row.id): row.cost_micros for row in UsageRequest.objects.all()}
    assert on_the_bus == expected
    assert in_the_books == expected


def test_an_open_reservation_stands_on_both_sides(floor: Floor, settle: Callable[[], None], gate: Gate) -> None:
    floor.reserve(str(uuid.UUID(int=1)))
    settle()
    found = look(gate)
    assert found.gate.open_micros == found.ledger_money.open_micros == 1_000
    assert found.is_right


def test_an_orphan_ended_at_the_gate_gives_its_money_back_on_both_sides(
    floor: Floor, settle: Callable[[], None], gate: Gate
) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    gate.end(Released(response_id=response_id, tenant_id=TENANT, reason="expired"))
    settle()
    found = look(gate)
    assert (found.gate.open_micros, found.ledger_money.open_micros) == (0, 0)
    assert UsageRequest.objects.get().state == "expired"


def test_the_gate_knows_records_and_living_gateways(floor: Floor, gate: Gate) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.client.set(KEYS.alive("gateway-1"), 1, px=15_000)
    records = gate.records([response_id, str(uuid.UUID(int=2))])
    assert {name: record.state for name, record in records.items()} == {response_id: "open"}
    assert gate.live_gateways(["gateway-1", "gateway-2"]) == {"gateway-1"}


def test_usage_that_waits_in_the_stream_is_said_to_be_undrained(floor: Floor, gate: Gate) -> None:
    busy_hour(floor, random.Random(3), 3)
    found = look(gate)
    assert (found.num_waiting_usages, found.is_drained, found.is_right) == (6, False, False)


def test_tokens_that_a_worker_never_committed_are_asked_of_nobody(
    floor: Floor, settle: Callable[[], None], gate: Gate
) -> None:
    busy_hour(floor, random.Random(7), 5)
    floor.worker.open()  # killed and started again: a new epoch, counting from 0
    busy_hour(floor, random.Random(8), 5)
    settle()
    assert look(gate).is_right
    assert len(gate.counted()) == 2


def test_a_response_given_up_while_its_worker_started_anew_is_rework_on_every_side(
    floor: Floor, settle: Callable[[], None], gate: Gate
) -> None:
    """Its Submit came just after the new epoch had emptied the inbox; the gateway saw another epoch and gave up."""
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.worker.open()
    gate.end(Released(response_id=response_id, tenant_id=TENANT, reason="worker_lost"))
    floor.finish(response_id, TokenCounts(prompt=100, output=7), Terminal.CANCELLED_ADMIN)
    settle()
    found = look(gate)
    assert found.is_right
    assert (found.rework.prompt_tokens, found.rework.output_tokens) == (100, 7)
    assert (found.engine.output_tokens, found.num_open_alerts) == (0, 0)
    assert (found.gate.open_micros, found.gate.settled_micros) == (0, 0)
    assert UsageRequest.objects.get().state == "released"


def test_a_response_given_up_just_after_its_worker_ended_it_is_charged_once(
    floor: Floor, settle: Callable[[], None], gate: Gate
) -> None:
    response_id = str(uuid.UUID(int=1))
    floor.reserve(response_id)
    floor.finish(response_id, TokenCounts(prompt=100, output=7))
    gate.end(Released(response_id=response_id, tenant_id=TENANT, reason="worker_lost"))
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
    floor: Floor, settle: Callable[[], None], tampering: str
) -> None:
    busy_hour(floor, random.Random(4), 10)
    settle()
    match tampering:
        case "rollup":
            Rollup.objects.update(output_tokens=1)
        case "gate":
            floor.client.hincrby(WINDOW, "settled", 1)
        case "engine":
            floor.client.hincrby(KEYS.counted("worker-1"), f"{floor.epoch}:output", 1)
    output = StringIO()
    with pytest.raises(CommandError, match="the books differ") as refusal:
        call_command("reconcile", "--json", "--drain-s=0", stdout=output)
    assert refusal.value.returncode == 1
    assert any(json.loads(output.getvalue())["differences"].values())


def test_the_table_says_that_there_are_no_differences(floor: Floor, settle: Callable[[], None]) -> None:
    busy_hour(floor, random.Random(5), 5)
    settle()
    output = StringIO()
    call_command("reconcile", "--drain-s=0", stdout=output)
    assert "no differences" in output.getvalue()
    assert str(floor.output_tokens) in output.getvalue()


def test_the_settler_process_books_what_comes_and_ends_cleanly_on_sigterm(
    service_environment: dict[str, str], project_root: Path, valkey: str, settings: Any
) -> None:
    settings.RUBATO_REDIS_PREFIX = KEYS.prefix
    environment = {**service_environment, "RUBATO_REDIS_PREFIX": KEYS.prefix}
    command = [sys.executable, "manage.py", "settle_usage"]
    process = subprocess.Popen(command, cwd=project_root, env=environment, stderr=subprocess.PIPE, text=True)
    floor = Floor(valkey, price_version=0, prices=FREE)
    try:
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
        busy_hour(floor, random.Random(6), 20)
        call_command("reconcile", "--drain-s=20", stdout=StringIO())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert "num_reserved=20" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
        floor.worker.close()
        floor.client.close()
    assert LedgerEntry.objects.count() == 40
