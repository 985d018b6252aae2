"""I2 and I3 as properties: whatever is repeated, reordered, cut into batches or lost in a crash, the books come out
the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import ledger, rollups, selectors
from billing.messages import LedgerMessage, Settlement
from billing.models import LedgerAlert, LedgerEntry, Rollup, UsageRequest
from billing.pricing import CHARGED_TERMINALS, Terminal, TokenCounts, charge_micros

MAX_OPERATIONS = 6


class Crash(Exception):
    """The settler dies between writing and committing."""


@st.composite
def ends(draw: st.DrawFn) -> tuple[Terminal | None, TokenCounts]:
    """How one operation ends; None: its gateway releases it."""
    prompt = draw(st.integers(0, 100))
    counts = TokenCounts(prompt=prompt, cached=draw(st.integers(0, prompt)), output=draw(st.integers(0, 1_000)))
    return draw(st.sampled_from([None, *Terminal])), counts


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[Any], list[list[int]], list[bool]]:
    """(ends per operation, batches of indexes into the messages, does the settler crash before this batch's commit)."""
    operations = draw(st.lists(ends(), min_size=1, max_size=MAX_OPERATIONS))
    indexes = list(range(2 * len(operations)))
    order = draw(st.permutations(indexes + draw(st.lists(st.sampled_from(indexes), max_size=8))))
    batches = []
    while order:
        size = draw(st.integers(1, len(order)))
        batches.append(order[:size])
        order = order[size:]
    return operations, batches, draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches)))


def messages_of(world: Any, operations: Sequence[Any]) -> list[LedgerMessage]:
    """A reservation and an end for each operation; classes and tenants vary with its number."""
    found: list[LedgerMessage] = []
    for number, (terminal, counts) in enumerate(operations):
        who = {
            "tenant_id": (world.aurora, world.bulk)[number % 2],
            "priority_class": ("interactive", "default", "batch")[number % 3],
        }
        found.append(world.reserve(number, money_micros=10_000, **who))
        if terminal is None:
            found.append(replace(world.release(number), tenant_id=who["tenant_id"]))
        else:
            found.append(world.usage(number, terminal=terminal, counts=counts, **who))
    return found


def deliver(batch: list[LedgerMessage], crashes: bool) -> None:
    """A batch whose settler crashes before the commit is delivered again."""
    if crashes:
        with contextlib.suppress(Crash), transaction.atomic():
            ledger.apply(batch)
            raise Crash
    ledger.apply(batch)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=deliveries())
def test_every_operation_is_booked_exactly_once_however_it_is_delivered(world: Any, plan: Any) -> None:  # P27
    operations, batches, crashes = plan
    with transaction.atomic():
        messages = messages_of(world, operations)
        for batch, crash in zip(batches, crashes, strict=True):
            deliver([messages[index] for index in batch], crash)
        check_books(world, messages)
        transaction.set_rollback(True)


def check_books(world: Any, messages: list[LedgerMessage]) -> None:
    counted = [message for message in messages if isinstance(message, Settlement)]
    prices = selectors.price_list(world.price_version)
    owed = sum(charge_micros(end.terminal, end.counts, prices.find(end.model, end.priority_class)) for end in counted)
    for operation in UsageRequest.objects.all():  # I2
        kinds = list(LedgerEntry.objects.filter(operation_id=operation.id).values_list("kind", flat=True))
        assert sum(kind in ("settle", "release") for kind in kinds) == 1
        assert kinds.count("reserve") == 1
        assert operation.state != "open"
    booked, rolled_up = selectors.ledger_sums(), selectors.rollup_sums()
    assert booked == rolled_up  # I3
    assert booked.output_tokens == sum(end.counts.output for end in counted)
    assert booked.prompt_tokens == sum(end.counts.prompt for end in counted)
    assert booked.cost_micros == owed
    assert rollups.num_wrong_rows() == 0
    assert not LedgerAlert.objects.exists()


@pytest.mark.parametrize("terminal", list(Terminal))
def test_only_charged_ends_are_ever_settles(world: Any, terminal: Terminal) -> None:
    ledger.apply([world.reserve(1), world.usage(1, terminal=terminal)])
    kinds = LedgerEntry.objects.values_list("kind", flat=True)
    assert ("settle" in kinds) == (terminal in CHARGED_TERMINALS)


@pytest.mark.parametrize("counts", [TokenCounts(0, 0, 0), TokenCounts(90, 30, 0), TokenCounts(100, 40, 33)])
@pytest.mark.parametrize("terminal", list(Terminal))
def test_a_downgraded_operation_is_charged_as_the_class_that_served_it_however_it_ends(
    world: Any, terminal: Terminal, counts: TokenCounts
) -> None:
    """P37, P38, P23. Both classes stand in the books; the one asked for changes no amount."""
    both = {"priority_class": "batch", "requested_class": "interactive"}
    ledger.apply([world.reserve(1, **both), world.usage(1, terminal=terminal, counts=counts, **both)])
    served = selectors.price_list(world.price_version).find(world.model, "batch")
    operation = UsageRequest.objects.get()
    assert (operation.requested_class, operation.priority_class) == ("interactive", "batch")
    assert operation.cost_micros == charge_micros(terminal, counts, served)
    assert (operation.cost_micros > 0) == (terminal in CHARGED_TERMINALS and counts.total > 0)
    assert set(LedgerEntry.objects.values_list("requested_class", "priority_class")) == {("interactive", "batch")}
    (rolled_up,) = Rollup.objects.all()
    assert (rolled_up.num_requests, rolled_up.num_downgraded) == (1, 1)
    assert rollups.num_wrong_rows() == 0
    assert not LedgerAlert.objects.exists()


def test_settlers_that_race_for_the_same_messages_book_each_once(transactional_db: None, world: Any) -> None:  # P33
    messages = [message for number in range(40) for message in (world.reserve(number), world.usage(number))]
    with ThreadPoolExecutor(3) as pool:
        shuffled = [random.Random(seed).sample(messages, len(messages)) for seed in range(6)]
        applied = sum(pool.map(_settle, shuffled), ledger.Applied())
    assert (applied.num_reserved, applied.num_settled, applied.num_repeated) == (40, 40, 5 * 80)
    assert selectors.ledger_sums() == selectors.rollup_sums()
    assert selectors.ledger_sums().output_tokens == 40 * 20
    assert not LedgerAlert.objects.exists()


def _settle(messages: list[LedgerMessage]) -> ledger.Applied:
    try:
        return ledger.apply(messages)
    finally:
        connection.close()  # this thread's own
