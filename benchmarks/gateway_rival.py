"""LiteLLM's proxy under the load of ``benchmarks.gateway``, in the same run, from a virtual environment of its own.

One worker, its master key, a fake upstream that answers at once: routing and its own books, and nothing else.
Starts both on loopback and ends them. Raises RuntimeError where it does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks import fake_upstream
from benchmarks.chats import Kind, caller, closed_loop
from benchmarks.figures import quantiles_ms, say
from benchmarks.serving import ROOT, free_port

KEY = "sk-bench"
START_LIMIT_S = 180.0
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "DO_NOT_TRACK": "1",
}
_CONFIG = """
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: "{upstream}/v1", api_key: sk-up}}
general_settings: {{master_key: {key}}}
litellm_settings: {{drop_params: true}}
"""


def program_of(python: Path) -> Path | None:
    """The proxy's program beside that Python; None where it is not installed."""
    found = python.parent / "litellm"
    return found if found.exists() else None


def measure(program: Path, *, num_requests: int, at_once: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rubato-rival-") as folder, contextlib.ExitStack() as stack:
        upstream, port = stack.enter_context(fake_upstream.running()), free_port()
        config = Path(folder) / "litellm.yaml"
        config.write_text(_CONFIG.format(upstream=upstream, key=KEY))
        command = [str(program), f"--config={config}", "--host=127.0.0.1", f"--port={port}", "--num_workers=1"]
        say("starting LiteLLM's proxy")
        proxy = stack.enter_context(_running(command, Path(folder) / "litellm.log"))
        _wait_for(f"http://127.0.0.1:{port}", proxy, Path(folder) / "litellm.log")
        return asyncio.run(_measure(f"http://127.0.0.1:{port}", psutil.Process(proxy.pid), num_requests, at_once))


async def _measure(base_url: str, process: psutil.Process, num_requests: int, at_once: int) -> dict[str, Any]:
    kind = Kind(model="fake", num_words=12, output_tokens=1, tier=None, extensions=False)
    refused: list[str] = []
    async with caller(base_url, KEY) as one:
        await closed_loop(one, kind, num_requests=max(1, num_requests // 10), at_once=at_once, refused=refused)
        alone, _ = await closed_loop(one, kind, num_requests=max(1, num_requests // 10), at_once=1, refused=refused)
        before = _cpu_s(process)
        crowd, seconds = await closed_loop(one, kind, num_requests=num_requests, at_once=at_once, refused=refused)
        used_s = _cpu_s(process) - before
    return {
        "requests": len(crowd),
        "requests_per_s": round(len(crowd) / seconds, 1),
        "requests_per_gateway_cpu_s": round(len(crowd) / used_s, 1) if used_s else None,
        "latency_alone_ms": quantiles_ms([answer.total_s for answer in alone]),
        "latency_ms": quantiles_ms([answer.total_s for answer in crowd]),
        "refused": len(refused),
    }


def _cpu_s(leader: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in [leader, *leader.children(recursive=True)])


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **QUIET}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(base_url: str, proxy: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and proxy.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{base_url}/health/liveliness", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"LiteLLM's proxy did not start: {log.read_text(errors='replace')[-300:]}")
