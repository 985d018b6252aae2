"""What the platform adds to a request: CPU of the door, the settler and the services, and latency.

The device costs nothing (``--executor simulated --device-profile instant``), so all that is measured is admission,
dispatch, the way through Redis and back, and settlement (P81). How soon a slot is free again, and an answer read on, is
asked of a device that takes its time; of a slow one, how soon what a killed gateway held is free, and a platform
stopped. ``--rival litellm`` sends the same requests to LiteLLM's proxy in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
import psycopg
from redis.asyncio import Redis

from benchmarks import fake_upstream, gateway_ending, gateway_resume, gateway_rival
from benchmarks.chats import Caller, Kind, ServerRefused, caller, closed_loop, open_loop
from benchmarks.figures import machine, quantiles_ms, report, say
from benchmarks.serving import Target, of_demo_file, own_platform
from tenants import api_keys

WARM_UP = 50
RATE, REFUSAL_RATE = 100.0, 500.0
CONNECTIONS = 64
AT_REST, AT_REST_LIMIT_S = 0.1, 60.0  # of one CPU
_LIMITS = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
REFUSALS: dict[str, tuple[str, dict[str, Any], int]] = {  # whose key, what is asked for beside, the answer
    "bad_key": ("sk_demo_000000000000_no", {}, 401),
    "unknown_key": (api_keys.make("demo").text, {}, 401),  # its checksum is right: looked up, once a second
    "never_within_limit": ("nova", {"n": 16, "max_tokens": 2_000}, 429),
    "no_such_model": ("aurora", {"model": "none"}, 404),
}
COMPARED = ("requests_per_s", "requests_per_gateway_cpu_s")
PARTS = {  # name -> a word of its command line
    "gateway": "gateway.asgi:application",
    "settler": "settle_usage",
    "worker": "gpu_worker",
    "valkey": "valkey-server",
    "postgres": "postgres",
}


class Family:
    """CPU seconds of the platform's processes. Always: a process counts with its children, under one name."""

    def __init__(self, port: int | None) -> None:
        gateway = next((one for one in _processes() if f"--port={port}" in one.cmdline() and _is("gateway", one)), None)
        parent = gateway.parent() if gateway is not None else None
        siblings = parent.children() if parent is not None else []
        self._all = siblings
        self.parts = {name: next((one for one in siblings if _is(name, one)), None) for name in PARTS}

    def cpu_s(self) -> dict[str, float]:
        return {name: _cpu_s(one) for name, one in self.parts.items() if one is not None}

    async def until_at_rest(self) -> None:
        """Those whom no request waits for are still starting when the door opens."""
        give_up = time.monotonic() + AT_REST_LIMIT_S
        while time.monotonic() < give_up:
            before = sum(map(_cpu_s, self._all))
            await asyncio.sleep(1)
            if sum(map(_cpu_s, self._all)) - before < AT_REST:
                return
        say("the platform's processes do not come to rest")


def _processes() -> Iterator[psutil.Process]:
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            one.cmdline()
            yield one


def _is(name: str, one: psutil.Process) -> bool:
    """Its command line holds the part's word, and no other part's."""
    words = " ".join(one.cmdline())
    return [part for part, word in PARTS.items() if word in words][:1] == [name]


def _cpu_s(leader: psutil.Process) -> float:
    total = 0.0
    for one in [leader, *leader.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


async def measure(target: Target, *, num_requests: int, at_once: int, seconds: float) -> dict[str, Any]:
    """Raises ServerRefused, HTTPError."""
    kind = Kind(model=target.model, num_words=12, output_tokens=1, tier="priority")
    family = Family(target.port)
    refused: list[str] = []
    await family.until_at_rest()
    async with caller(target.base_url, target.keys["aurora"]) as one:
        await closed_loop(one, kind, num_requests=WARM_UP, at_once=at_once)
        alone, _ = await closed_loop(one, kind, num_requests=max(20, num_requests // 10), at_once=1, refused=refused)
        before = family.cpu_s()
        crowd, took_s = await closed_loop(one, kind, num_requests=num_requests, at_once=at_once, refused=refused)
        await asyncio.sleep(1)  # the settler's part of it
        after = family.cpu_s()
        paced = await _paced(one, kind, refused, seconds)
    bare = await _bare(kind, num_requests, seconds)
    used = {name: after[name] - before[name] for name in after}
    gateway_s = used.get("gateway")
    return {
        "requests": len(crowd),
        "at_once": at_once,
        "requests_per_s": round(len(crowd) / took_s, 1),
        "requests_per_gateway_cpu_s": round(len(crowd) / gateway_s, 1) if gateway_s else None,
        "cpu_ms_per_request": {name: round(1_000 * cpu_s / len(crowd), 3) for name, cpu_s in used.items()},
        "latency_alone_ms": quantiles_ms([answer.total_s for answer in alone]),
        "latency_ms": quantiles_ms([answer.total_s for answer in crowd]),
        "at_rate": paced,
        "without_the_platform": bare,
        "added_p50_ms": {
            "alone": _beyond(quantiles_ms([answer.total_s for answer in alone]), bare["latency_alone_ms"]),
            "at_rate": _beyond(paced["latency_ms"], bare["at_rate"]["latency_ms"]),
        },
        "database_transactions_while_idle": await _transactions_while_idle(target, seconds),
        "refusals": {name: await _refusals(target, name, seconds) for name in REFUSALS},
        "refused": len(refused),
    }


async def _bare(kind: Kind, num_requests: int, seconds: float) -> dict[str, Any]:
    """The same requests from the same client to a server that answers at once."""
    with fake_upstream.running() as base_url:
        async with caller(base_url, None) as one:
            await closed_loop(one, kind, num_requests=WARM_UP, at_once=1)
            alone, _ = await closed_loop(one, kind, num_requests=max(20, num_requests // 10), at_once=1)
            paced = await _paced(one, kind, [], seconds)
    return {"latency_alone_ms": quantiles_ms([answer.total_s for answer in alone]), "at_rate": paced}


def _beyond(found: dict[str, float | None], bare: dict[str, float | None]) -> float | None:
    ours, theirs = found["p50"], bare["p50"]
    return None if ours is None or theirs is None else round(ours - theirs, 2)


async def _paced(one: Caller, kind: Kind, refused: list[str], seconds: float) -> dict[str, Any]:
    """Latency at RATE requests a second. On a machine that cannot send or answer as many the rate says so."""

    async def ask() -> float:
        started = time.perf_counter()
        try:
            return (await one.plain(kind)).total_s
        except ServerRefused as error:
            refused.append(str(error))
            return time.perf_counter() - started

    took, rate = await open_loop(ask, per_s=RATE, seconds=seconds)
    return {"requests_per_s": round(rate, 1), "latency_ms": quantiles_ms(took)}


async def _refusals(target: Target, name: str, seconds: float) -> dict[str, Any]:
    """How soon a request that is let in nowhere is told so, REFUSAL_RATE times a second, and what the database saw."""
    key, changes, status = REFUSALS[name]
    body = {"model": target.model, "messages": [{"role": "user", "content": "river"}], "max_tokens": 1, **changes}
    headers = {"Authorization": f"Bearer {target.keys.get(key, key)}"}
    statuses: Counter[int] = Counter()
    async with httpx2.AsyncClient(base_url=target.base_url, headers=headers, timeout=60, limits=_LIMITS) as client:

        async def ask() -> float:
            started = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=body)
            statuses[answer.status_code] += 1
            return time.perf_counter() - started

        await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))  # each opens a connection
        before = _transactions(target)
        took, rate = await open_loop(ask, per_s=REFUSAL_RATE, seconds=seconds)
        seen = _transactions(target)
    if set(statuses) != {status}:
        raise ServerRefused(f"refusals ({name}) were answered {dict(statuses)}, and not {status}")
    asked = None if before is None or seen is None else seen - before
    return {"requests_per_s": round(rate, 1), "latency_ms": quantiles_ms(took), "database_transactions": asked}


async def _transactions_while_idle(target: Target, seconds: float) -> int | None:
    """What the others (settler, Celery, this look) ask of the database in the same time, with nobody at the door."""
    before = _transactions(target)
    await asyncio.sleep(seconds)
    seen = _transactions(target)
    return None if before is None or seen is None else seen - before


def _transactions(target: Target) -> int | None:
    """Ended in the platform's database since it began, as PostgreSQL counts them (a second late at most)."""
    if target.data is None:
        return None
    addresses = json.loads((target.data / "services.json").read_text())
    with psycopg.connect(addresses["DATABASE_URL"], autocommit=True) as database:
        row = database.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return None if row is None else int(row[0])


async def _until_free(redis: Redis) -> None:
    """No response holds a slot any more."""
    while True:
        if not [key async for key in redis.scan_iter("rubato:lease:*", count=1_000, _type="zset")]:
            return
        await asyncio.sleep(0.001)


async def measure_leaving(target: Target, *, times: int) -> dict[str, Any]:
    """P73. How soon a slot is free that a client has left, or whose response was cancelled. Raises HTTPError."""
    if target.data is None:
        return {}
    addresses = json.loads((target.data / "services.json").read_text())
    headers = {"Authorization": f"Bearer {target.keys['aurora']}"}
    ask = {"model": target.model, "stream": True, "max_output_tokens": 1_500, "ignore_eos": True, "input": "river"}
    found: dict[str, list[float]] = {"disconnect": [], "cancel": []}
    async with (
        Redis.from_url(addresses["REDIS_URL"]) as redis,
        httpx2.AsyncClient(base_url=target.base_url, headers=headers, timeout=60) as client,
    ):
        for number in range(2 * times):
            how = ("disconnect", "cancel")[number % 2]
            async with client.stream("POST", "/v1/responses", json=ask) as answer:
                name, num_lines = "", 0
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and not name:
                        name = json.loads(line[5:])["response"]["id"]
                    num_lines += 1
                    if num_lines > 30:
                        break
                started = time.perf_counter()
                if how == "cancel":
                    await client.post(f"/v1/responses/{name}/cancel")
            await _until_free(redis)
            found[how].append(time.perf_counter() - started)
    return {f"{how}_ms": quantiles_ms(seconds) for how, seconds in found.items()}


@contextlib.contextmanager
def open_target(demo_file: Path | None, profile: str) -> Iterator[Target]:
    if demo_file is not None:
        yield of_demo_file(demo_file)
        return
    with own_platform(["--executor=simulated", f"--device-profile={profile}"]) as own:
        yield own


def run(found: argparse.Namespace) -> dict[str, Any]:
    """All parts, one after another. Raises ServerRefused, HTTPError, OSError, ValueError, RuntimeError."""
    with open_target(found.demo_file, "instant") as target:
        say(f"{found.requests} requests, {found.at_once} at once, to {target.base_url}")
        load = measure(target, num_requests=found.requests, at_once=found.at_once, seconds=found.seconds)
        result = asyncio.run(load)
    with open_target(found.demo_file, "toy") as target:
        result["slot_free_after"] = asyncio.run(measure_leaving(target, times=found.times))
        result["read_on_after"] = asyncio.run(gateway_resume.measure(target, times=found.times))
    if found.demo_file is None:
        result["ending"] = gateway_ending.measure(lambda own: Family(own.port).parts["gateway"])
    if found.rival is not None:
        result["rival"] = _rival(found)
        result["times_the_rival"] = {name: _times(result, result["rival"], name) for name in COMPARED}
    return result


def _rival(found: argparse.Namespace) -> dict[str, Any]:
    program = gateway_rival.program_of(found.rival_python)
    if program is None:
        return {"skipped": f"no litellm beside {found.rival_python}: pip install 'litellm[proxy]' in a venv of its own"}
    return gateway_rival.measure(program, num_requests=found.requests, at_once=found.at_once)


def _times(ours: dict[str, Any], rival: dict[str, Any], name: str) -> float | None:
    """How many times the rival's figure ours is; None where either has none."""
    mine, theirs = ours.get(name), rival.get(name)
    return round(mine / theirs, 1) if mine and theirs else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--demo-file", type=Path, help="demo.json of a running platform (one of our own)")
    parser.add_argument("--requests", type=int, default=2_000, help="Aurora may send 6,000 a minute")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each fixed rate lasts")
    parser.add_argument("--times", type=int, default=20, help="clients that leave, and as many that cancel")
    parser.add_argument("--rival", choices=["litellm"], help="measured in the same run")
    parser.add_argument("--rival-python", type=Path, default=Path(sys.executable), help="of the rival's own venv")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if min(found.requests, found.at_once, found.times) < 1 or found.seconds <= 0:
        parser.error("--requests, --at-once, --times and --seconds must be above 0")
    try:
        result = run(found)
    except (ServerRefused, httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"the benchmark broke off: {type(error).__name__} {error}\n")
        return 1
    report({"bench": "gateway", **result, **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
