"""Every limit in one atomic step on a real Valkey: P01, P06, and I1 and I4 of the case list."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from gateway.admission import Denied, Grant, Wish, duration_text
from gateway.errors import Reason
from gateway.money_windows import window_id, window_span
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tests.gateway.admission_world import Gate, denied, granted, opened
from wire.messages import Reserved
from wire.redis_bus import RedisUsageReader


@pytest.fixture
async def gate(valkey_url: str) -> AsyncIterator[Gate]:
    async with opened(valkey_url) as gate:
        yield gate


@pytest.mark.parametrize("repetition", range(20))
async def test_ten_parallel_requests_of_60_under_a_cap_of_100_let_in_exactly_one(gate: Gate, repetition: int) -> None:
    """P01 in one process, in every order; with processes of their own: test_admission_processes."""
    doors = [gate.another(), gate.another()]
    wishes = [gate.wish(prompt=30, max_tokens=30, money_micros=100) for _ in range(10)]
    random.Random(repetition).shuffle(wishes)
    outcomes = await asyncio.gather(*(doors[i % 2].admit([wish]) for i, wish in enumerate(wishes)))
    refusals = [outcome.refusal for outcome in outcomes if isinstance(outcome, Denied)]
    assert len(refusals) == 9
    assert {(r.status, r.row.code) for r in refusals} == {(429, "insufficient_quota")}
    assert await gate.money() == (60, 0)


async def test_settled_and_open_money_together_never_pass_the_cap(gate: Gate) -> None:
    first = granted(await gate.admit(30, 30, money_micros=100))
    assert denied(await gate.admit(30, 30, money_micros=100)).refusal.reason is Reason.MONEY
    await gate.end(first)
    assert await gate.money() == (0, 0)
    granted(await gate.admit(30, 30, money_micros=100))


async def test_a_refused_request_changes_nothing_at_all(gate: Gate) -> None:
    """I4, for each kind of limit, also when the limits before it would have let the request in."""
    granted(await gate.admit(30, 30, concurrency=1, money_micros=100, tokens_per_minute=100, requests_per_minute=2))
    before = await gate.everything()
    for limits, reason in (
        ({"concurrency": 1}, Reason.CONCURRENCY),
        ({"money_micros": 100}, Reason.MONEY),
        ({"tokens_per_minute": 100, "requests_per_minute": 2}, Reason.TOKENS_PER_MINUTE),
        ({"requests_per_minute": 2, "tokens_per_minute": 100, "concurrency": 9}, Reason.TOKENS_PER_MINUTE),
    ):
        assert denied(await gate.admit(30, 30, **limits)).refusal.reason is reason
        assert await gate.everything() == before


async def test_an_admitted_request_stands_in_the_usage_stream_before_anything_is_sent(gate: Gate) -> None:
    grant = granted(await gate.admit(10, 20))
    reader = RedisUsageReader(gate.url, keys=gate.keys)
    (entry,) = reader.read(10, 0.0)
    reader.close()
    assert isinstance(entry.message, Reserved)
    assert (entry.message.response_id, entry.message.money_micros) == (grant.response_id, 30)
    assert (entry.message.reserved_tokens, entry.message.window_id) == (30, "2027-01")


async def test_requests_per_minute_refill_with_time_and_tell_when(gate: Gate) -> None:
    for _ in range(3):
        granted(await gate.admit(requests_per_minute=3))
    refusal = denied(await gate.admit(requests_per_minute=3)).refusal
    assert (refusal.reason, refusal.retry_after_us) == (Reason.REQUESTS_PER_MINUTE, 20_000_000)
    gate.now_ms += 19_999
    denied(await gate.admit(requests_per_minute=3))
    gate.now_ms += 1
    granted(await gate.admit(requests_per_minute=3))


async def test_a_bucket_refills_exactly_over_many_small_steps(gate: Gate) -> None:
    """7 per minute is no whole number per millisecond: nothing may be lost or made up by rounding."""
    for _ in range(7):
        granted(await gate.admit(requests_per_minute=7))
    admitted = 0
    for _ in range(600):
        gate.now_ms += 101
        admitted += isinstance(await gate.admit(requests_per_minute=7), Grant)
    assert admitted == 60_600 * 7 // 60_000


async def test_a_bucket_never_holds_more_than_a_minute(gate: Gate) -> None:
    granted(await gate.admit(requests_per_minute=2))
    gate.now_ms += 3_600_000
    limits = granted(await gate.admit(requests_per_minute=2)).limits
    assert limits.requests is not None
    assert limits.requests.remaining == 1


async def test_parallel_requests_of_three_gateways_take_no_more_tokens_than_a_minute_holds(gate: Gate) -> None:  # P06
    gateways = [gate.admission, gate.another(), gate.another()]
    wishes = [gate.wish(prompt=20, max_tokens=100, tokens_per_minute=300) for _ in range(5)]
    outcomes = await asyncio.gather(*(gateways[n % 3].admit([wish]) for n, wish in enumerate(wishes)))
    refused = [outcome.refusal for outcome in outcomes if isinstance(outcome, Denied)]
    assert len(refused) == 3
    assert {refusal.row.error_type for refusal in refused} == {"tokens"}
    missing_tokens = 120 - (300 - 2 * 120)
    assert {refusal.headers()["retry-after"] for refusal in refused} == {str(missing_tokens * 60 // 300)}


async def test_a_released_request_gives_back_its_tokens_and_its_request(gate: Gate) -> None:
    limits = {"tokens_per_minute": 100, "requests_per_minute": 1, "concurrency": 1}
    grant = granted(await gate.admit(30, 30, **limits))
    assert grant.limits.tokens is not None
    assert grant.limits.tokens.remaining == 40
    await gate.end(grant)
    again = granted(await gate.admit(30, 30, **limits))
    assert again.limits == grant.limits


async def test_a_raised_limit_takes_effect_at_the_next_request(gate: Gate) -> None:
    granted(await gate.admit(requests_per_minute=1))
    denied(await gate.admit(requests_per_minute=1))
    granted(await gate.admit(requests_per_minute=2))


async def test_a_lowered_limit_caps_what_is_left(gate: Gate) -> None:
    granted(await gate.admit(requests_per_minute=100))
    limits = granted(await gate.admit(requests_per_minute=5)).limits
    assert limits.requests is not None
    assert limits.requests.remaining == 4


async def test_without_a_limit_nothing_is_counted_but_the_slot_and_the_money(gate: Gate) -> None:
    for _ in range(50):
        grant = granted(await gate.admit())
    assert (grant.limits.requests, grant.limits.tokens) == (None, None)
    assert await gate.money() == (1_000, 0)


async def test_a_concurrency_limit_set_while_requests_run_counts_those_too(gate: Gate) -> None:
    granted(await gate.admit())
    assert denied(await gate.admit(concurrency=1)).refusal.reason is Reason.CONCURRENCY


@pytest.mark.parametrize(
    "limits",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": 0},
        {"concurrency": 0},
        {"tokens_per_minute": 19},
    ],
)
async def test_what_its_limit_can_never_hold_is_refused_at_once_and_for_good(
    gate: Gate, limits: dict[str, int]
) -> None:  # P07
    refusal = denied(await gate.admit(10, 10, **limits)).refusal
    assert refusal.reason is Reason.NEVER_WITHIN_LIMIT
    assert refusal.headers() == {"x-should-retry": "false"}
    assert await gate.everything() == {}


async def test_the_first_refusal_for_money_stands_at_its_window(gate: Gate) -> None:
    assert denied(await gate.admit(money_micros=5)).refusal.reason is Reason.MONEY
    (name,) = [key async for key in gate.redis.scan_iter(f"{gate.keys.prefix}money:*")]
    first = await gate.redis.hget(name, "refused_ms")
    assert first is not None
    gate.now_ms += 60_000
    assert denied(await gate.admit(money_micros=5)).refusal.reason is Reason.MONEY
    assert await gate.redis.hget(name, "refused_ms") == first
    assert await gate.redis.ttl(name) > 86_400 * 31


@pytest.mark.parametrize(("below", "noted"), [(1_000, []), (6, ["default", "interactive"])], ids=["fits", "neither"])
async def test_a_budget_is_exhausted_by_calls_that_are_refused_and_by_none_that_overflow(
    gate: Gate, below: int, noted: list[str]
) -> None:
    own = gate.wish(money_micros=5)
    own = replace(own, priority_class=PriorityClass.INTERACTIVE)
    lower = replace(gate.wish(money_micros=below), response_id=own.response_id)
    answer = await gate.admission.admit([own], [lower])
    assert isinstance(answer, list if not noted else Denied)
    names = [key.decode() async for key in gate.redis.scan_iter(f"{gate.keys.prefix}money:*")]
    found = [name.split(":")[-2] for name in sorted(names) if await gate.redis.hexists(name, "refused_ms")]
    assert found == noted


async def test_zero_money_allows_nothing_that_costs(gate: Gate) -> None:
    assert denied(await gate.admit(money_micros=0)).refusal.reason is Reason.MONEY


async def test_another_class_of_the_same_tenant_has_limits_of_its_own(gate: Gate) -> None:
    granted(await gate.admit(concurrency=1))
    wish = gate.wish(concurrency=1)
    batch = TenantClassPolicy(tenant_id="nova", priority_class=PriorityClass.BATCH, concurrency=1)
    other = {**{f: getattr(wish, f) for f in wish.__slots__}, "priority_class": PriorityClass.BATCH, "quota": batch}
    assert isinstance(await gate.admission.admit([Wish(**other)]), list)


async def test_a_full_usage_stream_lets_nobody_in(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admission.MAX_USAGE_ENTRIES", 1)
    granted(await gate.admit())
    assert denied(await gate.admit()).refusal.status == 503


async def test_the_same_response_is_never_let_in_twice(gate: Gate) -> None:
    wish = gate.wish()
    assert isinstance(await gate.admission.admit([wish]), list)
    assert isinstance(await gate.admission.admit([wish]), Denied)
    assert await gate.money() == (20, 0)


async def test_while_redis_is_down_nobody_is_let_in() -> None:
    gate = Gate("redis://127.0.0.1:1/0", "nowhere:")
    refusal = denied(await gate.admit()).refusal
    await gate.close()
    assert (refusal.status, refusal.row.code) == (503, "service_unavailable")


@pytest.mark.parametrize(
    ("window", "zone", "expected"),
    [("day", "UTC", "2026-12-31"), ("day", "Pacific/Auckland", "2027-01-01"), ("month", "Pacific/Auckland", "2027-01")],
)
def test_a_money_window_is_a_calendar_window_in_the_tenants_zone(window: Any, zone: str, expected: str) -> None:
    # P41, P42
    quota = TenantClassPolicy(tenant_id="t", priority_class=PriorityClass.DEFAULT, money_window=window)
    assert window_id(quota, ZoneInfo(zone), 1_798_714_800_000) == expected  # 2026-12-31 11:00 UTC


@pytest.mark.parametrize(
    ("window", "zone", "at", "expected"),
    [
        ("day", "Europe/Vienna", "2026-10-25T22:59", ("2026-10-25T00:00+02:00", "2026-10-26T00:00+01:00")),  # 25 hours
        ("day", "Pacific/Kiritimati", "2026-12-31T10:00", ("2027-01-01T00:00+14:00", "2027-01-02T00:00+14:00")),
        ("month", "Europe/Vienna", "2026-12-31T23:00", ("2027-01-01T00:00+01:00", "2027-02-01T00:00+01:00")),
        ("month", "UTC", "2028-02-29T12:00", ("2028-02-01T00:00+00:00", "2028-03-01T00:00+00:00")),
    ],
)
def test_a_money_window_lasts_from_midnight_to_midnight_of_its_zone(
    window: str, zone: str, at: str, expected: tuple[str, str]
) -> None:
    local = datetime.fromisoformat(f"{at}+00:00").astimezone(ZoneInfo(zone))
    found = window_span(window, local)
    assert tuple(moment.isoformat(timespec="minutes") for moment in found) == expected
    assert found[0] <= local < found[1]


@pytest.mark.parametrize(("window", "anew"), [("day", "2027-01-16"), ("month", "2027-02-01")])
async def test_a_refusal_for_money_says_what_is_not_covered_and_when_the_budget_begins_anew(
    gate: Gate, window: Any, anew: str
) -> None:
    wish = replace(gate.wish(30, 80, money_micros=100, money_window=window), zone=ZoneInfo("Europe/Vienna"))
    found = await gate.admission.admit([wish])
    assert isinstance(found, Denied)
    assert found.refusal.message == (
        f"The budget of this {window} in class default does not cover this request at worst: its prompt and 80 output"
        f" tokens. It begins anew at {anew} 00:00 (Europe/Vienna)."
    )


@pytest.mark.parametrize(("milliseconds", "text"), [(0, "0ms"), (12, "12ms"), (1_000, "1s"), (360_000, "6m0s")])
def test_reset_times_are_written_as_the_openai_headers_write_them(milliseconds: int, text: str) -> None:
    assert duration_text(milliseconds) == text
