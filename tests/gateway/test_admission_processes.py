"""P01 as the case list demands it: web processes of their own, a barrier, many repetitions, I1 looked at meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from scheduler_engine.policy import PriorityClass
from wire.bus import StepOutput
from wire.messages import EngineCounters, Usage
from wire.redis_bus import RedisWorkerBus
from wire.redis_keys import Keys

CAP, WORST_CASE, COST = 100, 60, 50
NUM_PROCESSES = 3
EACH = 4
REPETITIONS = 25
ENGINE_S = 0.05


class Watcher:
    """Looks at one money window again and again. Always: a look is one command, so open and settled belong together."""

    def __init__(self, url: str, money_prefix: str) -> None:
        self.sums: list[tuple[int, int]] = []
        self._prefix = money_prefix
        self._client = redis.Redis.from_url(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        (name,) = self._window_names()
        while not self._stop.is_set():
            held = self._client.hmget(name, "open", "settled")
            self.sums.append((int(held[0] or 0), int(held[1] or 0)))

    def _window_names(self) -> list[str]:
        """The window of this month, as the admission will name it."""
        return [self._prefix + time.strftime("%Y-%m", time.gmtime())]


class Race:
    """Web processes, a worker that makes 50 tokens of every admitted response, and one Valkey."""

    def __init__(self, url: str, keys: Keys, processes: list[subprocess.Popen[str]]) -> None:
        self.url = url
        self.keys = keys
        self.worker = RedisWorkerBus(url, "worker-1", keys=keys)
        self._processes = processes
        self.worker.open()

    def run(self, tenant_id: str) -> list[dict[str, Any]]:
        """All asks start at one moment; returns what came of each."""
        at_ns = time.monotonic_ns() + 20_000_000
        order = json.dumps({"at_ns": at_ns, "tenant": tenant_id, "number": EACH})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        outcomes: list[dict[str, Any]] = []
        for process in self._processes:
            assert process.stdout is not None
            outcomes += json.loads(process.stdout.readline())
        return outcomes

    def settle(self, response_id: str, tenant_id: str) -> None:
        usage = Usage(
            response_id=response_id,
            attempt=1,
            tenant_id=tenant_id,
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
        self.worker.publish(StepOutput(usages=[usage]))

    def watcher(self, tenant_id: str) -> Watcher:
        return Watcher(self.url, self.keys.money(tenant_id, PriorityClass.DEFAULT.label, ""))


@pytest.fixture
def race(valkey_url: str, project_root: Path) -> Iterator[Race]:
    keys = Keys(f"race:{uuid.uuid4().hex}:")
    command = [sys.executable, str(Path(__file__).with_name("admitting_process.py")), valkey_url, keys.prefix]
    environment = {**os.environ, "PYTHONPATH": f"{project_root}:{project_root / 'platform'}"}
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(valkey_url))
        client.set(keys.gate_built, 1)
        processes = []
        for _ in range(NUM_PROCESSES):
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)  # closes its input, at which it ends, and waits for it
            processes.append(process)
        race = Race(valkey_url, keys, processes)
        yield race
        race.worker.close()
        for key in client.scan_iter(f"{keys.prefix}*"):
            client.delete(key)


def test_twelve_requests_of_three_processes_at_a_barrier_let_in_exactly_one_and_never_pass_the_cap(race: Race) -> None:
    # P03
    race.run("warm-up")
    for repetition in range(REPETITIONS):
        tenant_id = f"tenant-{repetition}"
        with race.watcher(tenant_id) as watcher:
            outcomes = race.run(tenant_id)
            admitted = [outcome["admitted"] for outcome in outcomes if "admitted" in outcome]
            refused = [(outcome["status"], outcome["code"]) for outcome in outcomes if "status" in outcome]
            time.sleep(ENGINE_S)  # the engine's own time, which the case gives
            for response_id in admitted:
                race.settle(response_id, tenant_id)
            late = race.run(tenant_id)
        assert len(admitted) == 1
        assert refused == [(429, "insufficient_quota")] * (NUM_PROCESSES * EACH - 1)
        assert [outcome.get("status") for outcome in late] == [429] * (NUM_PROCESSES * EACH)
        assert max(held + settled for held, settled in watcher.sums) == WORST_CASE <= CAP
        assert set(watcher.sums) <= {(0, 0), (WORST_CASE, 0), (0, COST)}
        assert len(watcher.sums) > 10
