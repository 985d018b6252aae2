"""The books: every operation exactly once, whatever is delivered twice, late, or wrong."""

from __future__ import annotations

import uuid
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, connections, transaction

from billing import ledger, selectors, services
from billing.messages import Counters
from billing.models import LedgerAlert, LedgerEntry, UsageRequest
from billing.pricing import Terminal, TokenCounts, TokenPrices


def entries(number: int, world: Any) -> list[tuple[str, int]]:
    found = LedgerEntry.objects.filter(operation_id=world.operation_id(number)).order_by("id")
    return list(found.values_list("kind", "amount_micros"))


def reasons() -> list[str]:
    return list(LedgerAlert.objects.order_by("id").values_list("reason", flat=True))


def test_a_call_is_reserved_at_its_worst_case_and_settled_at_what_it_cost(world: Any) -> None:
    ledger.apply([world.reserve(1)])
    ledger.apply([world.usage(1)])
    assert entries(1, world) == [("reserve", 615), ("settle", 27)]
    operation = UsageRequest.objects.get(id=world.operation_id(1))
    assert (operation.state, operation.cost_micros, operation.prompt_tokens, operation.output_tokens) == (
        "completed",
        27,
        100,
        20,
    )


def test_a_batch_says_how_many_lines_it_wrote(world: Any) -> None:
    messages = [world.reserve(1), world.reserve(2), world.reserve(1), world.usage(1), world.release(2)]
    applied = ledger.apply(messages)
    assert applied == ledger.Applied(num_reserved=2, num_settled=1, num_released=1, num_repeated=1)


@pytest.mark.parametrize("together", [True, False])
def test_a_redelivery_changes_nothing_and_is_no_alert(world: Any, together: bool) -> None:  # P32
    first, again = [world.reserve(1), world.usage(1)], [world.usage(1), world.reserve(1)]
    for batch in [first + again] if together else [first, again]:
        ledger.apply(batch)
    assert entries(1, world) == [("reserve", 615), ("settle", 27)]
    assert selectors.rollup_sums().output_tokens == 20
    assert reasons() == []


def test_usage_that_overtakes_its_reservation_ends_in_the_same_books(world: Any) -> None:
    ledger.apply([world.usage(1)])
    ledger.apply([world.reserve(1)])
    operation = UsageRequest.objects.get(id=world.operation_id(1))
    assert sorted(entries(1, world)) == [("reserve", 615), ("settle", 27)]
    assert (operation.state, operation.reserved_micros, operation.source, operation.window_id) == (
        "completed",
        615,
        "rest",
        "2026-11",
    )
    assert selectors.open_operations(reserved_before=operation.ended_at + timedelta(days=1), limit=9) == []
    assert reasons() == []


def test_a_redelivery_with_another_amount_is_an_alert_and_changes_nothing(world: Any) -> None:
    ledger.apply([world.reserve(1)])
    for _ in range(2):
        ledger.apply([world.reserve(1, money_micros=9_999)])
    assert entries(1, world) == [("reserve", 615)]
    assert reasons() == ["amounts_differ"]


def test_an_operation_ends_once_and_a_second_count_is_an_alert(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    ledger.apply([world.usage(1, counts=TokenCounts(prompt=100, output=21))])
    assert entries(1, world) == [("reserve", 615), ("settle", 27)]
    assert reasons() == ["second_end"]


@pytest.mark.parametrize("together", [True, False])
def test_usage_that_comes_after_a_release_is_rework_never_charged_and_no_alert(world: Any, together: bool) -> None:
    """The Submit crossed the Released on its way to a worker that was starting anew."""
    batches = [[world.reserve(1), world.release(1), world.usage(1)]]
    for batch in batches if together else [[message] for message in batches[0]]:
        ledger.apply(batch)
    assert entries(1, world) == [("reserve", 615), ("release", 0)]
    assert UsageRequest.objects.get().state == "released"
    assert selectors.rollup_sums().output_tokens == 0
    assert reasons() == []


def test_another_tenants_usage_after_a_release_is_an_alert(world: Any) -> None:
    ledger.apply([world.reserve(1), world.release(1)])
    ledger.apply([world.usage(1, tenant_id=world.nova)])
    assert reasons() == ["second_end"]


def test_a_second_count_after_a_counted_release_is_an_alert(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1, terminal=Terminal.FAILED_PLATFORM)])
    ledger.apply([world.usage(1)])
    assert reasons() == ["second_end"]


def test_a_release_that_comes_after_the_count_is_nothing_to_worry_about(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    ledger.apply([world.release(1)])
    assert entries(1, world) == [("reserve", 615), ("settle", 27)]
    assert reasons() == []


def test_a_client_that_drops_its_stream_pays_prompt_and_generated_tokens(world: Any) -> None:
    ended = world.usage(1, terminal=Terminal.CANCELLED_CLIENT, counts=TokenCounts(prompt=100, output=5))
    ledger.apply([world.reserve(1), ended])
    assert entries(1, world)[-1] == ("settle", 18)
    assert UsageRequest.objects.get(id=world.operation_id(1)).state == "cancelled_client"


@pytest.mark.parametrize("terminal", [Terminal.SHED, Terminal.FAILED_PLATFORM, Terminal.EXPIRED])
def test_an_end_that_is_the_platforms_doing_is_recorded_with_its_tokens_and_costs_nothing(
    world: Any, terminal: Terminal
) -> None:  # P23, P24
    ledger.apply([world.reserve(1), world.usage(1, terminal=terminal)])
    assert entries(1, world)[-1] == ("release", 0)
    operation = UsageRequest.objects.get(id=world.operation_id(1))
    assert (operation.state, operation.cost_micros, operation.output_tokens) == (terminal.value, 0, 20)
    assert selectors.ledger_sums().output_tokens == 20


def test_a_cancel_before_prefill_is_released(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1, terminal=Terminal.CANCELLED_CLIENT, counts=TokenCounts())])
    assert entries(1, world)[-1] == ("release", 0)


def test_recomputed_tokens_are_recorded_and_never_charged(world: Any) -> None:
    counters = Counters(num_preemptions=2, recomputed_tokens=5_000, swapped_bytes=1 << 30, gpu_us=70_000)
    ledger.apply([world.reserve(1), world.usage(1, counters=counters)])
    operation = UsageRequest.objects.get(id=world.operation_id(1))
    assert (operation.cost_micros, operation.recomputed_tokens, operation.gpu_us) == (27, 5_000, 70_000)


def test_an_operation_reserved_at_old_prices_is_settled_at_old_prices(world: Any) -> None:
    ledger.apply([world.reserve(1)])
    dearer = TokenPrices(prompt=15_000_000, cached=15_000_000, output=60_000_000)
    newer = services.set_prices(actor="tests", prices={(world.model, "default"): dearer}).version
    ledger.apply([world.usage(1), world.reserve(2, price_version=newer, money_micros=99_999)])
    ledger.apply([world.usage(2, price_version=newer)])
    assert [entries(number, world)[-1] for number in (1, 2)] == [("settle", 27), ("settle", 2_700)]


def test_the_prices_of_the_reservation_win_over_those_the_worker_names(world: Any) -> None:
    free = services.set_prices(
        actor="tests", prices={(world.model, "default"): TokenPrices(prompt=0, cached=0, output=0)}
    )
    ledger.apply([world.reserve(1)])
    ledger.apply([world.usage(1, price_version=free.version)])
    assert entries(1, world)[-1] == ("settle", 27)


def test_each_class_has_its_own_price(world: Any) -> None:  # P37
    for number, label in enumerate(("interactive", "default", "batch")):
        ledger.apply([world.reserve(number, priority_class=label), world.usage(number, priority_class=label)])
    assert [entries(number, world)[-1][1] for number in range(3)] == [54, 27, 14]


def test_a_model_without_a_price_costs_nothing_and_is_an_alert(world: Any) -> None:
    ledger.apply([world.reserve(1, model="unknown"), world.usage(1, model="unknown")])
    assert entries(1, world)[-1] == ("settle", 0)
    assert reasons() == ["price_unknown"]


def test_a_charge_above_its_reservation_is_an_alert(world: Any) -> None:
    ledger.apply([world.reserve(1, money_micros=26), world.usage(1)])
    assert reasons() == ["end_does_not_fit"]


@pytest.mark.parametrize("reserve_first", [True, False])
def test_an_end_that_names_another_tenant_is_an_alert_in_either_order(world: Any, reserve_first: bool) -> None:
    pair = [world.reserve(1), world.usage(1, tenant_id=world.bulk)]
    for message in pair if reserve_first else reversed(pair):
        ledger.apply([message])
    assert reasons() == ["end_does_not_fit"]


def test_a_message_the_database_cannot_hold_is_an_alert_and_its_neighbours_are_written(world: Any) -> None:
    monster = world.usage(2, counts=TokenCounts(prompt=1 << 70))
    applied = ledger.apply_surely([world.reserve(1), monster, world.usage(1)])
    assert (applied.num_refused, applied.num_settled) == (1, 1)
    assert entries(1, world) == [("reserve", 615), ("settle", 27)]
    assert reasons() == ["unwritable"]


def test_a_batch_is_written_whole_or_not_at_all(world: Any) -> None:
    with pytest.raises(DatabaseError):
        ledger.apply([world.reserve(1), world.usage(2, counts=TokenCounts(prompt=1 << 70))])
    assert LedgerEntry.objects.count() == 0


def test_a_batch_larger_than_promised_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match="500"):
        ledger.apply([world.release(number) for number in range(501)])


@pytest.mark.parametrize("alias", ["default", "owner"])
@pytest.mark.parametrize(
    "statement", ["UPDATE billing_ledgerentry SET amount_micros = 0", "DELETE FROM billing_ledgerentry"]
)
def test_nobody_changes_or_deletes_a_ledger_line(world: Any, alias: str, statement: str) -> None:
    ledger.apply([world.reserve(1)])
    if alias == "owner":  # row-level security shows the owner no row, so the trigger is asked of a table without it
        statement = statement.replace("ledgerentry", "price").replace("amount_micros", "micros_per_million")
        with transaction.atomic("owner"), connections["owner"].cursor() as cursor:
            cursor.execute("INSERT INTO billing_priceversion (actor, created_at) VALUES ('x', now()) RETURNING version")
            cursor.execute(
                "INSERT INTO billing_price (price_version_id, model, priority_class, token_kind, micros_per_million)"
                " VALUES (%s, 'm', 'batch', 'prompt', 1)",
                cursor.fetchone(),
            )
    with pytest.raises(DatabaseError, match=r"inserted only|permission denied"), transaction.atomic(alias):
        connections[alias].cursor().execute(statement)


def test_an_operation_cannot_have_both_ends_even_by_hand(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    line = LedgerEntry.objects.get(kind="settle")
    line.pk, line.kind, line.entry_key, line.amount_micros = None, "release", "release", 0
    with pytest.raises(DatabaseError, match="ledger_one_end"), transaction.atomic():
        line.save(force_insert=True)


def test_a_repair_is_a_line_that_names_its_operation(world: Any) -> None:  # P05
    ledger.apply([world.reserve(1), world.usage(1)])
    services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=-27, reason="outage")
    assert entries(1, world) == [("reserve", 615), ("settle", 27), ("adjust", -27)]
    with pytest.raises(ValidationError, match="no such operation"):
        services.adjust(actor="admin", operation_id=uuid.uuid4(), amount_micros=-27, reason="outage")
    with pytest.raises(ValidationError, match="reason"):
        services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=-27, reason="")


@pytest.mark.parametrize("before", [0, -20, 5])
def test_no_more_is_taken_back_than_an_operation_is_charged_by_then(world: Any, before: int) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    if before:
        services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=before, reason="first")
    left = 27 + before
    with pytest.raises(ValidationError, match=f"charged {left} micro-units") as refusal:
        services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=-left - 1, reason="slip")
    assert list(refusal.value.message_dict) == ["amount_micros"]
    services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=-left, reason="all of it")
    assert selectors.charged_micros(world.operation_id(1)) == 0


@pytest.mark.parametrize("kind", ["adjust", "credit"])
@pytest.mark.parametrize("amount", [10**15 + 1, 2**63 - 1])
def test_the_database_itself_takes_no_correction_beyond_the_bound(world: Any, kind: str, amount: int) -> None:
    with pytest.raises(DatabaseError, match="ledger_correction_bounded"), transaction.atomic():
        LedgerEntry.objects.create(
            operation_id=uuid.uuid4(), entry_key=f"{kind}:1", kind=kind, tenant_id=world.aurora, amount_micros=amount
        )


def test_a_charge_may_be_beyond_the_bound_of_corrections(world: Any) -> None:
    operation_id = world.operation_id(1)
    LedgerEntry.objects.create(
        operation_id=operation_id, entry_key="settle", kind="settle", tenant_id=world.aurora, amount_micros=10**16
    )
    assert selectors.charged_micros(operation_id) == 10**16


@pytest.mark.parametrize("amount", [10**15 + 1, -(10**15) - 1, 10**22])
def test_an_adjustment_beyond_the_bound_is_refused_by_name(world: Any, amount: int) -> None:
    ledger.apply([world.reserve(1), world.usage(1)])
    with pytest.raises(ValidationError, match="lies between -1,000,000,000,000,000 and") as refusal:
        services.adjust(actor="admin", operation_id=world.operation_id(1), amount_micros=amount, reason="slip")
    assert list(refusal.value.message_dict) == ["amount_micros"]


def test_window_sums_hold_what_is_settled_and_what_is_still_open(world: Any) -> None:
    ledger.apply([world.reserve(1), world.usage(1), world.reserve(2), world.reserve(3, window_id="2026-12")])
    since = UsageRequest.objects.earliest("reserved_at").reserved_at
    assert [astuple(sums) for sums in selectors.window_sums(since=since)] == [
        (world.aurora, "default", "2026-11", 27, 615),
        (world.aurora, "default", "2026-12", 0, 615),
    ]
