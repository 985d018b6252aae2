"""kill -9 of each process under load: the supervisor heals it, and every token stays counted exactly once.

A case is right when requests are served again, nobody hangs, every operation has ended and nothing stands reserved,
engines, gate, ledger and roll-ups agree to the token, and the ledger holds for each whole answer, once, the tokens that
its client was told. ``conftest.py`` prints the table.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
import redis

from tests.end_to_end.running_up import Up
from tests.soak.crowd import Crowd
from wire import codec
from wire.redis_keys import Keys

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy", "--kv-mib=8")
LOAD_AFTER_S = 3.0
POINT_S = 30.0
SERVED_AGAIN_S = 30.0
SETTLED_S = 150.0  # what lost its gateway and its worker is released after 90 s
VICTIMS = ("gateway", "worker", "settler", "celery", "batches", "valkey", "postgres")


class Situation:
    """What an onlooker sees of a platform under load. Always: asks Redis alone."""

    def __init__(self, gate_keeper: redis.Redis, crowd: Crowd) -> None:
        self._redis = gate_keeper
        self._crowd = crowd

    def _running(self) -> int:
        body = self._redis.get(Keys().load("worker-1"))
        load = codec.decode_load(body) if isinstance(body, bytes) else None
        return 0 if load is None else sum(row.num_running for row in load.classes)

    def is_at(self, point: str) -> bool:
        match point:
            case "somebody was let in":
                return any(True for _ in self._redis.scan_iter("rubato:lease:*", _type="zset"))
            case "somebody runs":
                return self._running() > 0
            case "many run":
                return self._running() > 4
            case "usage waits to be read":
                return self._usage("lag") > 0
            case "usage was read and is not acknowledged":
                return self._usage("pending") > 0
            case "somebody was served":
                return self._crowd.outcomes["served"] > 0
            case "somebody has left":
                return self._crowd.outcomes["left"] > 0
            case _:
                return self._crowd.outcomes["served"] > 60

    def _usage(self, what: str) -> int:
        groups: Any = self._redis.xinfo_groups(Keys().usage)
        return int(groups[0].get(what) or 0) if groups else 0


POINTS = (
    *("somebody was let in", "somebody runs", "many run", "usage waits to be read"),
    *("usage was read and is not acknowledged", "somebody was served", "somebody has left", "the middle of it all"),
)


@pytest.mark.parametrize("victim", VICTIMS)  # the quickest to change: one that dies time and again is given up
@pytest.mark.parametrize("point", POINTS)
async def test_after_the_kill_of_any_one_process_the_books_are_right_and_requests_are_served(
    platform: Up, victim: str, point: str, record_property: Callable[[str, object], None]
) -> None:
    """P31. A point that does not come within POINT_S (it lasts a moment only) is taken as it is then, and marked."""
    crowd = Crowd(platform, seed=1 + POINTS.index(point))
    record_property("outcomes", crowd.outcomes)
    with redis.Redis.from_url(platform.addresses["REDIS_URL"]) as gate_keeper:
        situation = Situation(gate_keeper, crowd)
        async with crowd.busy():
            record_property("has come", await _has_come_to(situation, point))
            await _killed(platform, [victim])
            await asyncio.sleep(LOAD_AFTER_S)
    await _is_right(platform, crowd)


async def test_a_gateway_and_a_worker_that_die_together_are_never_over_charged(platform: Up) -> None:
    """Nobody is left who could go on with what ran: it ends at no charge, and its reservation is given back."""
    crowd = Crowd(platform, seed=11)
    async with crowd.busy():
        await asyncio.sleep(LOAD_AFTER_S)
        await _killed(platform, ["gateway", "worker"])
        await asyncio.sleep(LOAD_AFTER_S)
    await _is_right(platform, crowd)


async def _has_come_to(situation: Situation, point: str) -> bool:
    deadline = time.monotonic() + POINT_S
    while time.monotonic() < deadline:
        if situation.is_at(point):
            return True
        await asyncio.sleep(0.002)
    return False


async def _killed(platform: Up, victims: Sequence[str]) -> None:
    """All at once; returns when each lives again."""
    pids = {victim: platform.pid_of(victim) for victim in victims}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for victim, pid in pids.items():
        await asyncio.to_thread(platform.wait_for, partial(_lives_anew, platform, victim, pid))


def _lives_anew(platform: Up, victim: str, pid: int) -> bool:
    return platform.pid_of(victim) != pid


async def _is_right(platform: Up, crowd: Crowd) -> None:
    await _is_served_again(crowd)
    found = await asyncio.to_thread(_reconciled, platform)
    assert found["is_right"], found
    assert found["gate"]["open_micros"] == found["ledger_money"]["open_micros"] == 0, found
    assert found["num_open_alerts"] == 0
    assert found["engine"]["output_tokens"] > 0
    assert crowd.outcomes["hung"] == 0, crowd.outcomes
    with psycopg.connect(platform.addresses["DATABASE_URL"]) as books:
        assert _num_open(books) == 0
        assert _charged(books, crowd) == Counter((operation, *tokens) for operation, tokens in crowd.told.items())


def _num_open(books: psycopg.Connection) -> int:
    return books.execute("SELECT count(*) FROM billing_usagerequest WHERE state = 'open'").fetchone()[0]


def _charged(books: psycopg.Connection, crowd: Crowd) -> Counter[Any]:
    """How often the ledger charges each whole answer, with which tokens."""
    rows = books.execute(
        "SELECT operation_id, prompt_tokens, output_tokens FROM billing_ledgerentry"
        " WHERE kind = 'settle' AND operation_id = ANY(%s)",
        [list(crowd.told)],
    )
    return Counter(rows.fetchall())


def _reconciled(platform: Up) -> dict[str, Any]:
    """The books once they are right and nothing stands reserved any more, or as they are when that takes too long."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = platform.reconcile(drain_s=5)
        if (found["is_right"] and not found["ledger_money"]["open_micros"]) or time.monotonic() > deadline:
            return found


async def _is_served_again(crowd: Crowd) -> None:
    async with asyncio.timeout(SERVED_AGAIN_S), crowd.client("aurora") as client:
        body = crowd.body(words=10, max_tokens=4, service_tier="priority")
        while (outcome := await crowd.ask(client, body)) != "served":
            crowd.outcomes[outcome] += 1
