"""``manage.py up``: the whole platform on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from gateway.databases import ALIASES
from gateway.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedService, EmbeddedValkey
from gateway.embedded.service import port_is_free, write_private
from gateway.supervision.demo_file import write_demo_file
from gateway.supervision.output import Output
from gateway.supervision.platform_processes import (
    DEVICE_PROFILES,
    PlatformOptions,
    base_environment,
    embedded_process,
    manage,
    platform_stages,
)
from gateway.supervision.supervisor import SupervisionError, Supervisor
from wire.gguf_header import ModelFileError
from wire.vocabulary import load as load_vocabulary

NEEDED_DISK_MIB = 512
_ROLE_OF_ALIAS = {"default": "app_ops", "tenant": "app_rw", "owner": "app_owner"}


class Command(BaseCommand):
    help = (
        "Start PostgreSQL and Valkey (unless DATABASE_URL and REDIS_URL are given), gateway, worker and their helpers."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="port of the gateway on 127.0.0.1 (8000)")
        parser.add_argument("--data", type=Path, default=settings.DATA_DIR, help="where all state is kept (.rubato)")
        parser.add_argument("--model", type=Path, help="GGUF file or model folder (the demo model)")
        parser.add_argument("--kv-mib", type=int, help="memory of the worker's KV pool (the worker's own default)")
        parser.add_argument("--weights", choices=("full", "int8"), help="int8: quicker on a CPU, a little less exact")
        parser.add_argument("--prefix-cache", choices=("on", "off"), help="off: no request shares blocks with another")
        parser.add_argument("--executor", choices=("model", "simulated"), default="model", help="what computes tokens")
        parser.add_argument("--device-profile", choices=DEVICE_PROFILES, help="what the simulated device is like")

    def handle(self, *args: Any, **choices: Any) -> None:
        options = _options(choices)
        with _only_one(options.data):
            output = Output(sys.stdout)
            supervisor = Supervisor(output)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda *_: supervisor.interrupt())
            try:
                _serve(options, supervisor, output)
            except (SupervisionError, EmbeddedError) as error:
                raise CommandError(_with_disk(str(error), options.data)) from error


def _options(choices: dict[str, Any]) -> PlatformOptions:
    """Raises CommandError with the one sentence that helps."""
    data = _data_folder(choices["data"])
    if not 1 <= choices["port"] <= 65_535:
        raise CommandError(f"--port must be from 1 to 65535, not {choices['port']}.")
    if not port_is_free(choices["port"]):
        raise CommandError(f"Port {choices['port']} is taken: stop what listens there or choose another with --port.")
    if (free_mib := _free_mib(data)) < NEEDED_DISK_MIB:
        raise CommandError(f"Only {free_mib} MiB are free for {data}; the platform needs {NEEDED_DISK_MIB} MiB.")
    return PlatformOptions(
        root=settings.BASE_DIR,
        data=data,
        port=choices["port"],
        executor=choices["executor"],
        kv_mib=choices["kv_mib"],
        weights=choices["weights"],
        prefix_cache=choices["prefix_cache"],
        device_profile=choices["device_profile"],
        model=_model(choices["model"], choices["executor"]),
    )


def _data_folder(given: Path) -> Path:
    data = given.resolve()
    try:
        data.mkdir(parents=True, exist_ok=True)
        (data / "lock").touch()
    except OSError as error:
        raise CommandError(
            f"--data must name a folder that can be written, and {data} is none: {error.strerror}."
        ) from error
    return data


def _model(given: Path | None, executor: str) -> Path | None:
    path = given or Path(settings.RUBATO_MODEL_PATH or settings.RUBATO_DEMO_MODEL_PATH)
    if path.exists():
        try:
            load_vocabulary(path)
        except (ModelFileError, OSError) as error:
            raise CommandError(f"{path} is no model that can be served: {error}") from error
        return path.resolve()
    if executor == "simulated" and given is None:
        return None
    raise CommandError(
        f"No model at {path}: run 'make model' to fetch the demo model, or give --model or --executor simulated."
    )


@contextlib.contextmanager
def _only_one(data: Path) -> Iterator[None]:
    """The kernel drops the lock with its process, so a killed ``up`` never blocks the next one."""
    with (data / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(f"Another 'manage.py up' already uses {data}.") from error
        yield


def _serve(options: PlatformOptions, supervisor: Supervisor, output: Output) -> None:
    services, addresses = _services(options.data)
    environment = base_environment(options, addresses)
    stages = [[embedded_process(service, environment) for service in services], *platform_stages(options, environment)]
    migrate = manage(options, environment, "migrate", "migrate", "--database=owner", "--no-input", "--verbosity=0")
    ready = f"serving on {options.base_url} (keys and logins: {options.data / 'demo.json'}); Ctrl-C stops"
    steps: list[Callable[[], None]] = [
        lambda: supervisor.start(stages[0]),
        lambda: write_private(options.data / settings.SERVICES_FILE.name, json.dumps(addresses, indent=2)),
        lambda: supervisor.run_once(migrate),
        lambda: _write_demo_file(options, environment, output),
        lambda: supervisor.start(stages[1] + stages[2]),  # the worker loads while the books open
        lambda: supervisor.start(stages[3]),
        lambda: output.line("up", ready),
    ]
    try:
        for step in steps:
            if not supervisor.is_interrupted:
                step()
        supervisor.run()
    finally:
        output.line("up", "stopping")
        supervisor.stop([spec.name for spec in stage] for stage in reversed(stages))
        (options.data / settings.SERVICES_FILE.name).unlink(missing_ok=True)
        output.line("up", "stopped")


def _write_demo_file(options: PlatformOptions, environment: Mapping[str, str], output: Output) -> None:
    for slug in write_demo_file(options, environment):
        output.line("up", f"{slug}: its demo key was revoked or rotated, so demo.json has none (seed_demo --reissue)")


def _services(data: Path) -> tuple[list[EmbeddedService], dict[str, str]]:
    """The servers to embed, prepared, and the addresses of all, given or embedded."""
    services: list[EmbeddedService] = []
    addresses = {name: os.environ[name] for name in (*ALIASES.values(), "REDIS_URL") if os.environ.get(name)}
    given = [name for name in ALIASES.values() if name in addresses]
    if not given:
        postgres = EmbeddedPostgres(data)
        postgres.prepare()
        services.append(postgres)
        addresses |= {name: postgres.url(_ROLE_OF_ALIAS[alias]) for alias, name in ALIASES.items()}
    elif len(given) < len(ALIASES):
        missing = " and ".join(name for name in ALIASES.values() if name not in given)
        raise SupervisionError(f"{given[0]} is given, so {missing} must be too: the platform uses three roles.")
    if "REDIS_URL" not in addresses:
        valkey = EmbeddedValkey(data)
        valkey.prepare()
        services.append(valkey)
        addresses["REDIS_URL"] = valkey.url
    return services, addresses


def _free_mib(folder: Path) -> int:
    return shutil.disk_usage(folder).free >> 20


def _with_disk(sentence: str, data: Path) -> str:
    return (
        f"The disk is full ({_free_mib(data)} MiB free): {sentence}"
        if _free_mib(data) < NEEDED_DISK_MIB // 8
        else sentence
    )
