"""The small world of the books: Aurora's, Bulk's and Nova's operations, and prices for one model."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from billing import services
from billing.messages import Release, Reservation, Settlement
from billing.pricing import Terminal, TokenCounts, TokenPrices
from gateway.gate import Gate
from gateway.settler import Settler
from scheduler_engine.policy import PriorityClass
from wire import codec
from wire.bus import StepOutput
from wire.messages import EngineCounters, Reserved, Usage
from wire.redis_bus import RedisUsageReader, RedisWorkerBus
from wire.redis_keys import Keys

MODEL = "smollm2-135m-instruct"
AURORA, BULK, NOVA = (uuid.uuid5(uuid.NAMESPACE_DNS, name) for name in ("aurora", "bulk", "nova"))
PROJECT, KEY = uuid.UUID(int=1), uuid.UUID(int=2)
PRICES = {
    (MODEL, "interactive"): TokenPrices(prompt=300_000, cached=150_000, output=1_200_000),
    (MODEL, "default"): TokenPrices(prompt=150_000, cached=75_000, output=600_000),
    (MODEL, "batch"): TokenPrices(prompt=75_000, cached=37_500, output=300_000),
}


class World:
    """Makes messages about operations by number. Prices are those of ``price_version``."""

    model = MODEL
    aurora, bulk, nova = AURORA, BULK, NOVA

    def __init__(self, price_version: int) -> None:
        self.price_version = price_version

    def operation_id(self, number: int) -> uuid.UUID:
        return uuid.UUID(int=0x0190 << 112 | 7 << 76 | 2 << 62 | number)

    def reserve(self, number: int, **changes: Any) -> Reservation:
        """The worst case of a call of 100 prompt tokens and up to 1,000 output tokens."""
        message = Reservation(
            operation_id=self.operation_id(number),
            tenant_id=AURORA,
            project_id=PROJECT,
            key_id=KEY,
            priority_class="default",
            model=MODEL,
            source="rest",
            money_micros=615,
            reserved_tokens=1_100,
            window_id="2026-11",
            policy_version=1,
            price_version=self.price_version,
        )
        return replace(message, **changes)

    def usage(self, number: int, **changes: Any) -> Settlement:
        """The same call, ended by itself after 20 tokens: 15 + 12 = 27 micro-units."""
        message = Settlement(
            operation_id=self.operation_id(number),
            attempt=1,
            tenant_id=AURORA,
            project_id=PROJECT,
            key_id=KEY,
            priority_class="default",
            model=MODEL,
            counts=TokenCounts(prompt=100, output=20),
            terminal=Terminal.COMPLETED,
            policy_version=1,
            price_version=self.price_version,
        )
        return replace(message, **changes)

    def release(self, number: int, reason: str = "worker_lost") -> Release:
        return Release(operation_id=self.operation_id(number), tenant_id=AURORA, reason=reason)


@pytest.fixture
def world(db: None) -> World:
    return World(services.set_prices(actor="tests", prices=PRICES).version)


BOOK_KEYS = Keys("books-test:")
MONEY_WINDOW = f"{BOOK_KEYS.prefix}money:{AURORA}:default:2026-11"


class Floor:
    """A worker on the real Bus, and a door that reserves as the admit script does."""

    keys, tenant_id, window, prices_of_default = BOOK_KEYS, str(AURORA), MONEY_WINDOW, PRICES[MODEL, "default"]

    def __init__(self, url: str, price_version: int, prices: TokenPrices = PRICES[MODEL, "default"]) -> None:
        self.client = redis.Redis.from_url(url)
        self.worker = RedisWorkerBus(url, "worker-1", keys=BOOK_KEYS)
        self.epoch = self.worker.open()
        self.price_version = price_version
        self.prices = prices
        self.prompt_tokens = self.output_tokens = 0

    def reserve(self, response_id: str, money_micros: int = 1_000) -> None:
        self.client.hset(
            BOOK_KEYS.response(response_id),
            mapping={
                "state": "open",
                "gateway": "gateway-1",
                "worker": "worker-1",
                "attempt": "1",
                "money_keys": json.dumps([MONEY_WINDOW]),
                "money_reserved": money_micros,
                "price_prompt": self.prices.prompt,
                "price_cached": self.prices.cached,
                "price_output": self.prices.output,
            },
        )
        self.client.hincrby(MONEY_WINDOW, "open", money_micros)
        self.client.hsetnx(MONEY_WINDOW, "settled", 0)
        message = Reserved(
            response_id=response_id, source="rest", money_micros=money_micros, reserved_tokens=9, window_id="2026-11",
            **self._same(),
        )  # fmt: skip
        self.client.xadd(BOOK_KEYS.usage, {"m": codec.encode([message])})

    def finish(self, response_id: str, counts: TokenCounts, terminal: Terminal = Terminal.COMPLETED) -> None:
        self.prompt_tokens += counts.prompt
        self.output_tokens += counts.output
        message = Usage(
            response_id=response_id, attempt=1, prompt_tokens=counts.prompt, cached_tokens=counts.cached,
            output_tokens=counts.output, terminal=terminal.value, counters=EngineCounters(), **self._same(),
        )  # fmt: skip
        self.worker.publish(StepOutput(usages=[message]))

    def busy_hour(self, rng: random.Random, number: int) -> None:
        """Calls of every kind of end."""
        for _ in range(number):
            response_id = str(uuid.UUID(int=rng.getrandbits(128)))
            self.reserve(response_id)
            prompt = rng.randrange(1, 500)
            counts = TokenCounts(prompt=prompt, cached=rng.randrange(prompt), output=rng.randrange(500))
            self.finish(response_id, counts, rng.choice(list(Terminal)))

    def _same(self) -> dict[str, Any]:
        return {
            "tenant_id": str(AURORA),
            "project_id": str(uuid.UUID(int=1)),
            "key_id": str(uuid.UUID(int=2)),
            "priority_class": PriorityClass.DEFAULT,
            "model": MODEL,
            "policy_version": 1,
            "price_version": self.price_version,
        }


@pytest.fixture
def floor(world: Any, valkey: str, settings: Any) -> Iterator[Floor]:
    settings.RUBATO_REDIS_PREFIX = BOOK_KEYS.prefix
    floor = Floor(valkey, world.price_version)
    yield floor
    floor.worker.close()
    floor.client.close()


@pytest.fixture
def settle(floor: Floor, valkey: str) -> Iterator[Callable[[], None]]:
    reader = RedisUsageReader(valkey, keys=BOOK_KEYS)
    settler = Settler(reader, clock_s=lambda: 0.0, stopped_after=lambda seconds: True)

    def run() -> None:
        while settler.settle_some():
            pass

    yield run
    reader.close()


@pytest.fixture
def gate(floor: Floor, valkey: str) -> Iterator[Gate]:
    with Gate(valkey, BOOK_KEYS) as gate:
        yield gate
