"""Races as the case list demands them: web processes of their own, a barrier, repetitions, limits looked at meanwhile.

A few repetitions are in ``make test``, many in ``make soak``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.racing import COST, NUM_PROCESSES, WORST_CASE, Held, Race, Watcher, assert_adds_up, racing

CAP = 100
EACH = 4
MANY = NUM_PROCESSES * EACH
ENGINE_S = 0.05
START_MS = time.time_ns() // 1_000_000  # where the clock of limits stands still
FIVE = 5
LIMITS = {  # each lets in five of twelve
    "MONEY": {"money_micros": FIVE * WORST_CASE},
    "REQUESTS_PER_MINUTE": {"requests_per_minute": FIVE},
    "TOKENS_PER_MINUTE": {"tokens_per_minute": FIVE * WORST_CASE},
    "CONCURRENCY": {"concurrency": FIVE},
}
ALL_LIMITS = {"money_micros": 8 * WORST_CASE, "requests_per_minute": 9, "tokens_per_minute": 500, "concurrency": 6}
repeated = pytest.mark.parametrize("repetitions", [3, pytest.param(25, marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def race(valkey_url: str, project_root: Path) -> Iterator[Race]:
    with racing(valkey_url, project_root) as race:
        yield race


@repeated
def test_twelve_requests_of_three_processes_at_a_barrier_let_in_exactly_one_and_never_pass_the_cap(
    race: Race, repetitions: int
) -> None:
    """P01, P03."""
    limits = {"money_micros": CAP}
    for repetition in range(repetitions):
        tenant = f"one-{repetitions}-{repetition}"
        with Watcher(race, tenant) as watcher:
            outcomes = race.run(tenant, each=EACH, limits=limits)
            admitted = [outcome["admitted"] for outcome in outcomes if "admitted" in outcome]
            refused = [(outcome["status"], outcome["code"]) for outcome in outcomes if "status" in outcome]
            time.sleep(ENGINE_S)  # the engine's own time, which the case gives
            race.settle(admitted, tenant)
            late = race.run(tenant, each=EACH, limits=limits)
        assert len(admitted) == 1
        assert refused == [(429, "insufficient_quota")] * (MANY - 1)
        assert [outcome.get("status") for outcome in late] == [429] * MANY
        sums = {(look.open_micros, look.settled_micros) for look in watcher.looks}
        assert sums <= {(0, 0), (WORST_CASE, 0), (0, COST)}
        assert (WORST_CASE, 0) in sums
        assert_adds_up(race, tenant, limits)


@repeated
@pytest.mark.parametrize("reason", LIMITS)
def test_of_twelve_requests_of_three_processes_a_limit_for_five_lets_in_five_and_the_others_take_nothing(
    race: Race, reason: str, repetitions: int
) -> None:
    """P06, P13."""
    limits = LIMITS[reason]
    for repetition in range(repetitions):
        tenant = f"{reason}-{repetitions}-{repetition}"
        with Watcher(race, tenant) as watcher:
            outcomes = race.run(tenant, each=EACH, limits=limits, now_ms=START_MS)
        assert sum("admitted" in outcome for outcome in outcomes) == FIVE
        assert [outcome["reason"] for outcome in outcomes if "reason" in outcome] == [reason] * (MANY - FIVE)
        assert all(_is_within(look, limits) for look in watcher.looks)
        assert_adds_up(race, tenant, limits)


@repeated
def test_what_overflows_is_held_to_the_lower_classes_limits_and_takes_nothing_of_the_first(
    race: Race, repetitions: int
) -> None:
    """P37 in a race: five in the class asked for, three below it, four nowhere."""
    limits = {"money_micros": FIVE * WORST_CASE, "concurrency": FIVE}
    lower = {"money_micros": 3 * WORST_CASE}
    for repetition in range(repetitions):
        tenant = f"overflow-{repetitions}-{repetition}"
        outcomes = race.run(tenant, each=EACH, limits=limits, lower=lower, now_ms=START_MS)
        labels = Counter(record["cls"] for record in race.records(tenant).values())
        assert labels == {"default": FIVE, "batch": 3}
        assert sum("admitted" in outcome for outcome in outcomes) == FIVE + 3
        for label, number in labels.items():
            held = race.held(tenant, label)
            assert (held.open_micros, held.num_leases) == (number * WORST_CASE, number)


@repeated
def test_while_some_are_let_in_others_settle_and_are_taken_back_at_once_and_everything_still_adds_up(
    race: Race, repetitions: int
) -> None:
    """Every response ends by whichever came first, the worker's count or a gateway's release, and never by both."""
    ended = set()
    for repetition in range(repetitions):
        tenant = f"all-{repetitions}-{repetition}"
        with Watcher(race, tenant) as watcher:
            first = race.run(tenant, each=EACH, limits=ALL_LIMITS, now_ms=START_MS)
            admitted = [outcome["admitted"] for outcome in first if "admitted" in outcome]
            at_ns = race.start(tenant, each=EACH, limits=ALL_LIMITS, now_ms=START_MS, release=admitted)
            settling = threading.Thread(target=_settle_at, args=(race, tenant, admitted, at_ns))
            settling.start()
            race.outcomes()
            settling.join()
        assert len(admitted) == ALL_LIMITS["concurrency"]
        assert all(_is_within(look, ALL_LIMITS) for look in watcher.looks)
        records = race.records(tenant)
        assert {records[response_id]["state"] for response_id in admitted} == {"done"}
        ended |= {records[response_id]["terminal"] for response_id in admitted}
        assert_adds_up(race, tenant, ALL_LIMITS)
    assert ended <= {"completed", "released"}
    if repetitions > 20:
        assert ended == {"completed", "released"}, "never a race"


def _settle_at(race: Race, tenant: str, response_ids: list[str], at_ns: int) -> None:
    """One after the other: each is a race of its own."""
    while time.monotonic_ns() < at_ns:
        pass
    for response_id in response_ids:
        race.settle([response_id], tenant)


def _is_within(held: Held, limits: dict[str, int]) -> bool:
    """I1."""
    money, concurrency = limits.get("money_micros"), limits.get("concurrency")
    return (
        (money is None or held.open_micros + held.settled_micros <= money)
        and (concurrency is None or held.num_leases <= concurrency)
        and all(level is None or level >= 0 for level in (held.tokens_left, held.requests_left))
    )
