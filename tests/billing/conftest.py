"""The small world of the books: Aurora's, Bulk's and Nova's operations, and prices for one model."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest

from billing import services
from billing.messages import Release, Reservation, Settlement
from billing.pricing import Terminal, TokenCounts, TokenPrices

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
