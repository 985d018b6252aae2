"""Three web processes, one worker and one Valkey, for races: what they hold is watched, and checked at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from scheduler_engine.policy import PriorityClass
from wire import codec
from wire.bus import StepOutput
from wire.messages import EngineCounters, Released, Reserved, Usage
from wire.redis_bus import RedisWorkerBus
from wire.redis_keys import ENTRY_FIELD, Keys

NUM_PROCESSES = 3
WORST_CASE, COST = 60, 50
LABEL = PriorityClass.DEFAULT.label


@dataclass(frozen=True, slots=True)
class Held:
    """What one tenant holds in one class. None where there is no such limit, or nothing was ever taken."""

    open_micros: int
    settled_micros: int
    num_leases: int
    tokens_left: int | None
    requests_left: int | None


class Race:
    """Web processes, a worker that makes 50 tokens of every admitted response, and one Valkey."""

    def __init__(self, url: str, keys: Keys, processes: Sequence[subprocess.Popen[str]], client: redis.Redis) -> None:
        self.url = url
        self.keys = keys
        self._processes = processes
        self._client = client
        self._worker = RedisWorkerBus(url, "worker-1", keys=keys)
        self._worker.open()

    def close(self) -> None:
        self._worker.close()

    def start(self, tenant: str, *, each: int, limits: Mapping[str, int], **more: Any) -> int:
        """Tell every process to ask for ``each`` at one moment, which is returned."""
        at_ns = time.monotonic_ns() + 20_000_000
        order = json.dumps({"at_ns": at_ns, "tenant": tenant, "number": each, "limits": dict(limits), **more})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        return at_ns

    def outcomes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for process in self._processes:
            assert process.stdout is not None
            found += json.loads(process.stdout.readline())
        return found

    def run(self, tenant: str, **order: Any) -> list[dict[str, Any]]:
        self.start(tenant, **order)
        return self.outcomes()

    def settle(self, response_ids: Sequence[str], tenant: str) -> None:
        """The worker's word that they are complete, in one step."""
        self._worker.publish(StepOutput(usages=[_usage(response_id, tenant) for response_id in response_ids]))

    def held(self, tenant: str, label: str = LABEL) -> Held:
        """One look: everything belongs to one instant."""
        with self._client.pipeline(transaction=True) as look:
            look.hmget(self.keys.money(tenant, label, time.strftime("%Y-%m", time.gmtime())), "open", "settled")
            look.zcard(self.keys.lease(tenant, label))
            for kind in ("tokens", "requests"):
                look.hget(self.keys.bucket(tenant, label, kind), "level")
            money, num_leases, tokens, requests = look.execute()
        opened, settled = (int(amount or 0) for amount in money)
        return Held(
            opened, settled, num_leases, *(None if level is None else int(level) for level in (tokens, requests))
        )

    def records(self, tenant: str) -> dict[str, dict[str, str]]:
        """Every response of the tenant that was ever let in."""
        found = {}
        for key in self._client.scan_iter(f"{self.keys.response('')}*"):
            record = {name.decode(): value.decode() for name, value in self._client.hgetall(key).items()}
            if record["tenant"] == tenant:
                found[key.decode().removeprefix(self.keys.response(""))] = record
        return found

    def said(self, tenant: str) -> dict[str, list[str]]:
        """What the books will read about each response, in order: ``reserved``, and how it ended."""
        found: dict[str, list[str]] = {}
        for _, fields in self._client.xrange(self.keys.usage):
            for message in codec.decode(fields[ENTRY_FIELD], ""):
                assert isinstance(message, Reserved | Usage | Released)
                if message.tenant_id == tenant:
                    found.setdefault(message.response_id, []).append(_word(message))
        return found


def _word(message: Reserved | Usage | Released) -> str:
    match message:
        case Reserved():
            return "reserved"
        case Usage():
            return message.terminal
        case Released():
            return "released"


def _usage(response_id: str, tenant: str) -> Usage:
    return Usage(
        response_id=response_id,
        attempt=1,
        tenant_id=tenant,
        project_id="p",
        key_id="k",
        priority_class=PriorityClass.DEFAULT,
        model="m",
        prompt_tokens=20,
        cached_tokens=0,
        output_tokens=COST - 20,
        terminal="completed",
        policy_version=1,
        price_version=1,
        counters=EngineCounters(),
    )


class Watcher:
    """Looks at what a tenant holds, again and again, while the block runs."""

    def __init__(self, race: Race, tenant: str) -> None:
        self.looks: list[Held] = []
        self._race = race
        self._tenant = tenant
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.looks.append(self._race.held(self._tenant))


@contextmanager
def racing(url: str, root: Path) -> Iterator[Race]:
    keys = Keys(f"race:{uuid.uuid4().hex}:")
    command = [sys.executable, str(Path(__file__).with_name("admitting_process.py")), url, keys.prefix]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'platform'}"}
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(url))
        client.set(keys.gate_built, 1)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [  # each closes its input at the end, at which it ends, and is waited for
            stack.enter_context(subprocess.Popen(command, env=environment, **pipes)) for _ in range(NUM_PROCESSES)
        ]
        race = Race(url, keys, processes, client)
        stack.callback(race.close)
        race.run("warm-up", each=1, limits={})
        yield race
        for key in client.scan_iter(f"{keys.prefix}*"):
            client.delete(key)


def assert_adds_up(race: Race, tenant: str, limits: Mapping[str, int]) -> None:
    """I1, I2 and I4 on a clock that stands still: what is held is exactly what those let in took and gave back; each of
    them was told to the books once and ended once, the way its record says; nobody else was told to them at all.
    """
    records, held, said = race.records(tenant), race.held(tenant), race.said(tenant)
    is_open = [record["state"] == "open" for record in records.values()]
    used = [0 if record.get("terminal") == "released" else COST for record in records.values()]
    returned = [record.get("terminal") == "released" for record in records.values()]
    assert {record["state"] for record in records.values()} <= {"open", "done"}
    assert held.num_leases == sum(is_open)
    assert held.open_micros == WORST_CASE * sum(is_open)
    assert held.settled_micros == sum(cost for cost, still in zip(used, is_open, strict=True) if not still)
    if "tokens_per_minute" in limits:
        taken = sum(WORST_CASE if still else cost for cost, still in zip(used, is_open, strict=True))
        assert held.tokens_left == limits["tokens_per_minute"] - taken
    if "requests_per_minute" in limits:
        assert held.requests_left == limits["requests_per_minute"] - len(records) + sum(returned)
    assert said.keys() == records.keys()
    for response_id, words in said.items():
        assert Counter(words)["reserved"] == 1
        assert words[0] == "reserved"
        ends = words[1:]
        assert ends[:1] == [records[response_id]["terminal"]] if ends else records[response_id]["state"] == "open"
