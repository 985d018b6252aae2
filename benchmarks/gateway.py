"""What the platform adds to a request: CPU of the door, the settler and the services, and latency.

The device costs nothing (``--executor simulated --device-profile instant``), so all that is measured is admission,
dispatch, the way through Redis and back, and settlement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.chats import Kind, ServerRefused, caller, closed_loop
from benchmarks.figures import machine, quantile, report, say
from benchmarks.serving import Target, of_demo_file, own_platform

WARM_UP = 50
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
        self.parts = {name: next((one for one in siblings if _is(name, one)), None) for name in PARTS}

    def cpu_s(self) -> dict[str, float]:
        return {name: _cpu_s(one) for name, one in self.parts.items() if one is not None}


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


async def measure(target: Target, *, num_requests: int, at_once: int) -> dict[str, Any]:
    """Raises ServerRefused, HTTPError."""
    kind = Kind(model=target.model, num_words=12, output_tokens=1, tier="priority")
    family = Family(target.port)
    async with caller(target.base_url, target.keys["aurora"]) as one:
        await closed_loop(one, kind, num_requests=WARM_UP, at_once=at_once)
        alone, _ = await closed_loop(one, kind, num_requests=max(20, num_requests // 10), at_once=1)
        before = family.cpu_s()
        crowd, seconds = await closed_loop(one, kind, num_requests=num_requests, at_once=at_once)
        await asyncio.sleep(1)  # the settler's part of it
        after = family.cpu_s()
    used = {name: after[name] - before[name] for name in after}
    gateway_s = used.get("gateway")
    return {
        "requests": len(crowd),
        "at_once": at_once,
        "requests_per_s": round(len(crowd) / seconds, 1),
        "requests_per_gateway_cpu_s": round(len(crowd) / gateway_s, 1) if gateway_s else None,
        "cpu_ms_per_request": {name: round(1_000 * cpu_s / len(crowd), 3) for name, cpu_s in used.items()},
        "latency_alone_ms": _quantiles_ms([answer.total_s for answer in alone]),
        "latency_ms": _quantiles_ms([answer.total_s for answer in crowd]),
    }


def _quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99)}
    return {name: None if value is None else round(1_000 * value, 2) for name, value in found.items()}


@contextlib.contextmanager
def open_target(demo_file: Path | None) -> Iterator[Target]:
    if demo_file is not None:
        yield of_demo_file(demo_file)
        return
    with own_platform(["--executor=simulated", "--device-profile=instant"]) as own:
        yield own


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--demo-file", type=Path, help="demo.json of a running platform (one of our own)")
    parser.add_argument("--requests", type=int, default=2_000, help="Aurora may send 6,000 a minute")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if min(found.requests, found.at_once) < 1:
        parser.error("--requests and --at-once must be at least 1")
    try:
        with open_target(found.demo_file) as target:
            say(f"{found.requests} requests, {found.at_once} at once, to {target.base_url}")
            result = asyncio.run(measure(target, num_requests=found.requests, at_once=found.at_once))
    except (ServerRefused, httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"the benchmark broke off: {error}\n")
        return 1
    report({"bench": "gateway", **result, **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
