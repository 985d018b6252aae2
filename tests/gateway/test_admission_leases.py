"""Who runs at once: places that are held, renewed, left by the dead, taken again and waited for (P13, P14)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.admission import LEASE_MS, Denied, Standing
from gateway.errors import Reason
from tests.gateway.admission_world import Gate, denied, granted, opened


@pytest.fixture
async def gate(valkey_url: str) -> AsyncIterator[Gate]:
    async with opened(valkey_url) as gate:
        yield gate


async def test_two_hung_responses_give_their_slots_back_when_nobody_renews_them(gate: Gate) -> None:
    """P14. The third call is served; with renewal it is not."""
    hung = [granted(await gate.admit(concurrency=2)) for _ in range(2)]
    gate.now_ms += LEASE_MS - 1
    await gate.renew(*hung)
    gate.now_ms += LEASE_MS - 1
    denied(await gate.admit(concurrency=2))
    gate.now_ms += 1
    granted(await gate.admit(concurrency=2))


async def test_a_lease_that_has_ended_is_not_renewed_back_to_life(gate: Gate) -> None:
    grant = granted(await gate.admit(concurrency=1))
    await gate.end(grant)
    await gate.renew(grant)
    granted(await gate.admit(concurrency=1))


async def test_a_lease_that_ran_out_while_nobody_could_renew_it_is_taken_again_while_its_response_goes_on(
    gate: Gate,
) -> None:
    """Its gateway slept, or Redis did: whoever came meanwhile is one more, and nobody else is let in."""
    slept = granted(await gate.admit(concurrency=1))
    gate.now_ms += LEASE_MS + 1
    meanwhile = granted(await gate.admit(concurrency=1))
    assert await gate.renew(slept) == [Standing.OURS]
    await gate.end(meanwhile)
    assert denied(await gate.admit(concurrency=1)).refusal.reason is Reason.CONCURRENCY
    await gate.end(slept)
    granted(await gate.admit(concurrency=1))


async def test_whoever_renews_learns_what_is_anothers_by_now_and_what_has_ended(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are more than one call of the script takes, and where the records name no gateway or are gone."""
    monkeypatch.setattr("gateway.admission.MAX_RENEWED", 2)
    kept, moved, ended, lost, unnamed, gone = [granted(await gate.admit()) for _ in range(6)]
    for grant in (moved, lost):
        await gate.redis.hset(gate.keys.response(grant.response_id), "gateway", "another")
    await gate.end(ended)
    await gate.end(lost)
    await gate.redis.hdel(gate.keys.response(unnamed.response_id), "gateway")
    await gate.redis.delete(gate.keys.response(gone.response_id))
    ours, anothers = Standing.OURS, Standing.ANOTHERS
    found = await gate.renew(kept, moved, ended, lost, unnamed, gone)
    assert found == [ours, anothers, Standing.ENDED, anothers, ours, ours]


async def test_parallel_requests_never_pass_the_concurrency_limit(gate: Gate) -> None:  # P13
    doors = [gate.another() for _ in range(3)]
    outcomes = await asyncio.gather(*(doors[i % 3].admit([gate.wish(concurrency=5)]) for i in range(60)))
    assert sum(not isinstance(outcome, Denied) for outcome in outcomes) == 5


async def test_who_may_wait_is_let_in_over_the_concurrency_limit_and_nobody_passes_it_by(gate: Gate) -> None:
    """P18. The engine runs no more of them than the limit."""
    running = granted(await gate.admit(concurrency=1))
    waiting = granted(await gate.admit(concurrency=1, may_wait=True))
    await gate.end(running)
    assert denied(await gate.admit(concurrency=1)).refusal.reason is Reason.CONCURRENCY
    await gate.end(waiting)
    granted(await gate.admit(concurrency=1))


async def test_who_may_wait_is_still_held_to_every_other_limit(gate: Gate) -> None:
    for limits, reason in (
        ({"concurrency": 0}, Reason.NEVER_WITHIN_LIMIT),
        ({"concurrency": 1, "money_micros": 5}, Reason.MONEY),
    ):
        assert denied(await gate.admit(**limits, may_wait=True)).refusal.reason is reason
