"""A gate that Redis has lost lets nobody in until it stands again as the books say: no more, no less, and once."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.db import connections

from billing.models import UsageRequest
from billing.pricing import TokenPrices
from gateway import policy_feed
from gateway.admission import Admission, Denied, Grant, Wish
from gateway.embedded import EmbeddedValkey, running
from gateway.gate import Gate
from gateway.rebuild import FORGOTTEN_S, STILL_S, GateBuilder
from gateway.reconciliation import look
from gateway.settler import Settler
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.bus import StepOutput
from wire.messages import EngineCounters, Released, Usage
from wire.redis_bus import RedisUsageReader, RedisWorkerBus
from wire.redis_keys import Keys

KEYS = Keys("rebuild-test:")
AURORA = str(uuid.uuid5(uuid.NAMESPACE_DNS, "aurora"))
MODEL = "smollm2-135m-instruct"
PRICES = TokenPrices(prompt=150_000, cached=75_000, output=600_000)
CAP = 2_000
RESERVED = 615  # 100 prompt tokens and up to 1,000 output tokens
SPENT = 27  # of which 20 were made


class House:
    """Door, worker, settler and builder around one Redis; the builder's clock is moved by the test."""

    def __init__(self, url: str, price_version: int) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url)
        self.gate = Gate(url, KEYS)
        self.reader = RedisUsageReader(url, keys=KEYS)
        self.now_s = 0.0
        self.builder = self.new_builder()
        self._price_version = price_version
        self._settler = Settler(self.reader, clock_s=lambda: 0.0, stopped_after=lambda seconds: True)

    def close(self) -> None:
        self.gate.__exit__(None, None, None)
        self.reader.close()
        self.client.close()

    def new_builder(self) -> GateBuilder:
        return GateBuilder(self.url, KEYS, lambda: self.now_s)

    def build(self) -> bool:
        """As a gateway does: look, and look again when the books have stood still."""
        return self.builder.build() or self.build_later()

    def build_later(self) -> bool:
        self.now_s += STILL_S
        return self.builder.build()

    def admit(self, **limits: Any) -> Grant | Denied:
        async def ask() -> Grant | Denied:
            async with redis.asyncio.Redis.from_url(self.url, protocol=2) as client:
                found = await Admission(client, KEYS).admit([self._wish(**limits)])
                return found if isinstance(found, Denied) else found[0]

        return asyncio.run(ask())

    def _wish(self, **limits: Any) -> Wish:
        quota = TenantClassPolicy(
            tenant_id=AURORA, priority_class=PriorityClass.DEFAULT, **{"money_micros": CAP, **limits}
        )
        return Wish(
            response_id=str(uuid.uuid4()),
            gateway_id="gateway-1",
            worker_id="worker-1",
            tenant_id=AURORA,
            project_id=str(uuid.UUID(int=1)),
            key_id=str(uuid.UUID(int=2)),
            priority_class=PriorityClass.DEFAULT,
            model=MODEL,
            source="rest",
            prompt_tokens=100,
            max_tokens=1_000,
            quota=quota,
            prices=PRICES,
            zone=ZoneInfo("UTC"),
            policy_version=1,
            price_version=self._price_version,
        )

    def admit_surely(self) -> str:
        outcome = self.admit()
        assert isinstance(outcome, Grant), outcome
        return outcome.response_id

    def finish(self, response_id: str) -> None:
        """A worker, of a new epoch each time, has made 20 tokens of it."""
        worker = RedisWorkerBus(self.url, "worker-1", keys=KEYS)
        worker.open()
        usage = Usage(
            response_id=response_id,
            attempt=1,
            tenant_id=AURORA,
            project_id=str(uuid.UUID(int=1)),
            key_id=str(uuid.UUID(int=2)),
            priority_class=PriorityClass.DEFAULT,
            model=MODEL,
            prompt_tokens=100,
            cached_tokens=0,
            output_tokens=20,
            terminal="completed",
            policy_version=1,
            price_version=self._price_version,
            counters=EngineCounters(),
        )
        worker.publish(StepOutput(usages=[usage]))
        worker.close()

    def settle(self) -> None:
        while self._settler.settle_some():
            pass

    def money(self) -> tuple[int, int]:
        """(open, settled) over all windows."""
        windows = self.gate.windows().values()
        return sum(w.open_micros for w in windows), sum(w.settled_micros for w in windows)

    def lose_everything(self) -> None:
        self.client.flushdb()


@pytest.fixture
def house(world: Any, valkey: str, settings: Any) -> Iterator[House]:
    settings.RUBATO_REDIS_PREFIX = KEYS.prefix
    house = House(valkey, world.price_version)
    assert house.build()
    yield house
    house.close()


def one_spent_one_open(house: House) -> str:
    """Returns the open one."""
    house.finish(house.admit_surely())
    return house.admit_surely()


def refused_with(outcome: Grant | Denied) -> tuple[int, str]:
    assert isinstance(outcome, Denied), outcome
    return outcome.refusal.status, str(outcome.refusal.row.code)


def test_a_new_platform_opens_at_the_first_look(house: House) -> None:
    house.lose_everything()
    assert house.builder.build()
    assert isinstance(house.admit(), Grant)


def test_a_redis_that_lost_everything_lets_nobody_in_until_the_gate_stands_as_before(house: House) -> None:
    one_spent_one_open(house)
    house.settle()
    assert house.money() == (RESERVED, SPENT)
    house.lose_everything()
    assert refused_with(house.admit()) == (503, "service_unavailable")
    assert house.client.keys(f"{KEYS.prefix}*") == []
    assert house.build()
    assert house.money() == (RESERVED, SPENT)
    assert look(house.gate).num_wrong_windows == 0
    house.admit_surely()
    house.admit_surely()
    assert refused_with(house.admit()) == (429, "insufficient_quota")


def test_a_rebuilt_reservation_keeps_its_slot_until_its_lease_ends(house: House) -> None:
    one_spent_one_open(house)
    house.settle()
    house.lose_everything()
    house.build()
    assert refused_with(house.admit(concurrency=1)) == (429, "rate_limit_exceeded")


def test_a_rebuilt_reservation_ends_on_both_sides_as_if_nothing_had_happened(house: House) -> None:
    counted, released = one_spent_one_open(house), house.admit_surely()
    house.settle()
    house.lose_everything()
    house.build()
    house.finish(counted)
    house.gate.end(Released(response_id=released, tenant_id=AURORA, reason="worker_lost"))
    house.settle()
    assert house.money() == (0, 2 * SPENT)
    found = look(house.gate)
    assert (found.num_wrong_windows, found.ledger_money.open_micros) == (0, 0)


def test_what_ended_before_the_gate_stood_again_is_not_held_for_ever(house: House) -> None:
    """A gateway gives up its responses at once; its word may still wait when another one builds."""
    lost = one_spent_one_open(house)
    house.settle()
    house.lose_everything()
    house.gate.end(Released(response_id=lost, tenant_id=AURORA, reason="worker_lost"))
    assert not house.build()
    house.settle()
    assert house.build()
    assert house.money() == (0, SPENT)


def test_what_comes_while_the_books_are_read_makes_the_builder_read_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = one_spent_one_open(house)
    house.settle()
    house.lose_everything()
    publish = policy_feed.publish

    def publish_late(document: Any) -> None:
        """The last thing before the script: by now the books have been read."""
        if UsageRequest.objects.filter(state="open").exists():
            house.gate.end(Released(response_id=lost, tenant_id=AURORA, reason="worker_lost"))
            house.settle()
        publish(document)

    monkeypatch.setattr("gateway.policy_feed.publish", publish_late)
    assert not house.build()
    assert house.build()
    assert house.money() == (0, SPENT)


def test_books_that_still_move_are_read_again(house: House) -> None:
    """A settler may hold what it read from the stream that was lost."""
    house.finish(house.admit_surely())
    house.settle()
    late = house.admit_surely()
    held = house.reader.read(10, 0.0)
    house.lose_everything()
    assert not house.builder.build()
    settler = Settler(_Held(held), clock_s=lambda: 0.0, stopped_after=lambda seconds: True)
    settler.settle_some()
    assert not house.build_later()
    assert house.build_later()
    assert house.money() == (RESERVED, SPENT)
    assert [one.response_id for one in (entry.message for entry in held)] == [late]


class _Held:
    """A reader whose stream has gone since."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries

    def read(self, count: int, timeout_s: float) -> Any:
        return self._entries

    def acknowledge(self, entry_ids: Any) -> None: ...


def test_a_gate_that_stands_is_left_alone(house: House) -> None:
    one_spent_one_open(house)  # not in the books yet
    assert house.builder.build()
    assert house.money() == (RESERVED, SPENT)


def test_an_operator_has_the_gate_built_anew_by_deleting_its_mark(house: House) -> None:
    one_spent_one_open(house)
    house.client.hincrby(next(house.client.scan_iter(f"{KEYS.prefix}money:*")), "settled", 500)
    house.client.hset(KEYS.money(AURORA, "batch", "1999-01"), mapping={"open": 7, "settled": 7})
    house.client.delete(KEYS.gate_built)
    assert not house.build()
    house.settle()
    assert house.build()
    assert house.money() == (RESERVED, SPENT)


def test_the_policy_stands_in_redis_before_anybody_is_let_in(house: House) -> None:
    house.lose_everything()
    house.build()
    assert house.client.exists(KEYS.policy_current) == 1


def test_gateways_that_start_at_once_do_not_build_double(transactional_db: None, house: House) -> None:
    one_spent_one_open(house)
    house.settle()
    builders = [house.new_builder() for _ in range(3)]
    for _ in range(5):
        house.now_s += FORGOTTEN_S + 1
        house.lose_everything()
        assert not any(builder.build() for builder in builders)
        house.now_s += STILL_S
        barrier = threading.Barrier(len(builders))
        threads = [threading.Thread(target=_build, args=(barrier, builder)) for builder in builders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert house.client.exists(KEYS.gate_built) == 1
        assert house.money() == (RESERVED, SPENT)


def _build(barrier: threading.Barrier, builder: GateBuilder) -> None:
    try:
        barrier.wait()
        builder.build()
    finally:
        connections.close_all()


def test_a_redis_that_restarts_with_what_it_kept_is_not_built_again(world: Any, tmp_path: Path, settings: Any) -> None:
    server = EmbeddedValkey(tmp_path)
    settings.RUBATO_REDIS_PREFIX = KEYS.prefix
    with running(server, tmp_path / "log"):
        settings.REDIS_URL = server.url
        house = House(server.url, world.price_version)
        assert house.build()
        one_spent_one_open(house)
        house.settle()
        house.admit_surely()  # its reservation waits in the stream
        built_at = house.client.get(KEYS.gate_built)
    with running(server, tmp_path / "log"):
        assert house.build()
        assert house.client.get(KEYS.gate_built) == built_at
        assert house.money() == (2 * RESERVED, SPENT)
        house.settle()
        assert look(house.gate).is_right
        house.close()
