"""The processes that make up the platform on one machine, in the order in which they start.

Knows their command lines and their environment; refuses to know how they are kept alive.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.embedded import EmbeddedService
from gateway.embedded.service import LOOPBACK
from gateway.supervision.process import ProcessSpec
from wire import codec
from wire.bus import BusError
from wire.redis_bus import bus_errors, connect
from wire.redis_keys import LOAD_LIFETIME_MS, Keys

WORKER_ID = "worker-1"
# One HTTP version: a server that still has to guess it waits for the first byte without a limit. Connections that say
# nothing, and idle ones, end after ten seconds, and more of them fit than one client is likely to open.
SERVER_OPTIONS = (
    "--interface=asgi",
    "--loop=uvloop",
    "--http=1",
    "--http1-header-read-timeout=10000",
    "--backlog=4096",
    "--backpressure=8192",
)
DEVICE_PROFILES = ("cpu-smollm2", "h200-8b", "instant", "toy")  # the worker's own; a test holds them together


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformOptions:
    """What a person can choose. ``model`` is None for the simulated executor where no model file gives a vocabulary."""

    root: Path
    data: Path
    port: int
    executor: str
    model: Path | None
    kv_mib: int | None = None
    weights: str | None = None
    prefix_cache: str | None = None
    device_profile: str | None = None

    @property
    def base_url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def base_environment(options: PlatformOptions, addresses: Mapping[str, str]) -> dict[str, str]:
    """Environment of every process. ``addresses`` are DATABASE_URL and its like, by name."""
    return {
        **os.environ,
        **addresses,
        "DJANGO_SETTINGS_MODULE": "gateway.settings",
        "RUBATO_DATA": str(options.data),
        "RUBATO_EXECUTOR": options.executor,
        "RUBATO_MODEL_PATH": str(options.model or ""),
        "PYTHONUNBUFFERED": "1",
        "MALLOC_ARENA_MAX": "2",  # glibc otherwise keeps an arena per thread, tens of MiB in each process
        "OMP_NUM_THREADS": "1",  # only the worker computes
        "TOKENIZERS_PARALLELISM": "false",
    }


def embedded_process(service: EmbeddedService, environment: Mapping[str, str]) -> ProcessSpec:
    return ProcessSpec(
        name=service.name,
        command=service.command,
        environment=environment,
        before_start=service.prepare,
        is_ready=service.is_ready,
        stop_signal=service.stop_signal,
    )


def manage(options: PlatformOptions, environment: Mapping[str, str], name: str, *arguments: str) -> ProcessSpec:
    """A ``manage.py`` command as a process."""
    command = [sys.executable, str(options.root / "manage.py"), *arguments]
    return ProcessSpec(name=name, command=lambda: command, environment=environment)


def platform_stages(options: PlatformOptions, environment: Mapping[str, str]) -> list[list[ProcessSpec]]:
    """Books, worker, doors. They stop in reverse: the books when the worker has counted its last, and before it, all at
    once, the doors and those who help them.
    """
    doors = [
        _gateway(options, environment),
        manage(options, environment, "batches", "run_batches"),
        _celery("celery", environment, "worker", "--pool=threads", "--concurrency=1", "--without-gossip"),
        _celery("beat", environment, "beat", f"--schedule={options.data / 'celery-beat-schedule'}", "--pidfile="),
    ]
    return [[manage(options, environment, "settler", "settle_usage")], [_worker(options, environment)], doors]


def _celery(name: str, environment: Mapping[str, str], *arguments: str) -> ProcessSpec:
    # As root Celery warns at every start; here it serves loopback only.
    command = [sys.executable, "-W", "ignore:::celery.platforms", "-m", "celery", "--quiet", "--app=gateway.celery"]
    command += [*arguments, "--loglevel=WARNING"]
    return ProcessSpec(name=name, command=lambda: command, environment=environment)


def _gateway(options: PlatformOptions, environment: Mapping[str, str]) -> ProcessSpec:
    command = [sys.executable, "-m", "granian", *SERVER_OPTIONS, f"--host={LOOPBACK}", f"--port={options.port}"]
    command += ["--workers=1", "--log-level=warning", "--workers-kill-timeout=3"]
    return ProcessSpec(
        name="gateway",
        command=lambda: [*command, "gateway.asgi:application"],
        environment=environment,
        is_ready=lambda: _answers_http(options.port),
    )


def _worker(options: PlatformOptions, environment: Mapping[str, str]) -> ProcessSpec:
    command = [sys.executable, "-m", "gpu_worker", f"--executor={options.executor}", f"--worker-id={WORKER_ID}"]
    command += [f"--record={options.data / 'recorded'}"]
    if options.model is not None:
        command += [f"--model={options.model}"]
    if options.kv_mib is not None:
        command += [f"--kv-mib={options.kv_mib}"]
    if options.weights is not None:
        command += [f"--weights={options.weights}"]
    if options.prefix_cache is not None:
        command += [f"--prefix-cache={options.prefix_cache}"]
    if options.device_profile is not None:
        command += [f"--device-profile={options.device_profile}"]
    return ProcessSpec(
        name="worker",
        command=lambda: command,
        environment={
            **environment,
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
        },  # one core is for the rest
        is_ready=lambda: worker_is_ready(environment["REDIS_URL"]),
        asked_after_s=LOAD_LIFETIME_MS / 1_000,  # by then the last word of the worker before has expired
        stop_timeout_s=30.0,  # it drains: what runs is finished and settled
    )


def worker_is_ready(redis_url: str) -> bool:
    """Whether the worker's newest LoadSnapshot says so."""
    try:
        with bus_errors(), connect(redis_url) as client:
            body = client.get(Keys().load(WORKER_ID))
    except BusError:
        return False
    load = codec.decode_load(body) if isinstance(body, bytes) else None
    return load is not None and load.ready


def _answers_http(port: int) -> bool:
    """Any answer counts; what it says is not the supervisor's business."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
