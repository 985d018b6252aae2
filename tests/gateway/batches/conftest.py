"""One gateway for a whole module of tests: real keys and rows, files in a folder of the test's own, no worker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.utils import timezone
from openai import OpenAI, types
from pytest_django import DjangoDbBlocker

from gateway import runtime as gateway_runtime
from gateway.batches import tasks
from gateway.batches.models import Batch
from gateway.batches.services import Owner
from gateway.batches.storage import Storage
from gateway.celery import app as celery_app
from gateway.run_batches import BatchOwner
from gateway.runtime import Runtime
from gateway.settler import Settler
from gateway.supervision.platform_processes import WORKER_ID, worker_is_ready
from tenants.models import ApiKey
from tests.gateway.conftest import serving
from wire.redis_bus import RedisUsageReader
from wire.redis_keys import Keys

MODEL = "simulated"
CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Platform:
    """A gateway behind a loopback port, and what stands behind it."""

    base_url: str
    keys: dict[str, str]
    files: Path
    runtime: Runtime
    _clients: dict[str, OpenAI] = field(default_factory=dict)

    def client(self, tenant: str = "aurora") -> OpenAI:
        """The official client, which checks our bodies against its own types."""
        if tenant not in self._clients:
            self._clients[tenant] = OpenAI(
                base_url=f"{self.base_url}/v1",
                api_key=self.keys[tenant],
                max_retries=0,
                _strict_response_validation=True,
            )
        return self._clients[tenant]

    @property
    def storage(self) -> Storage:
        return Storage(self.files)

    def contents(self) -> list[Path]:
        """Everything on the disk, drafts too."""
        return [path for path in self.files.rglob("*") if path.is_file()]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def request_line(custom_id: str, words: str = "Hi", **body: Any) -> dict[str, Any]:
    """One line of an input file."""
    whole = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_completion_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def uuid_of(shown_id: str) -> UUID:
    return UUID(hex=shown_id.rpartition("-")[2].rpartition("_")[2])


def owner_of(key_text: str) -> Owner:
    key = ApiKey.objects.get(public_id=key_text.split("_")[2])
    return Owner(tenant_id=key.tenant_id, project_id=key.project_id, key_id=key.id, key_public_id=key.public_id)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll for something that another thread or process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def books(
    django_db_setup: None, migrated: Any, django_db_blocker: DjangoDbBlocker, valkey_url: str
) -> Iterator[dict[str, str]]:
    """The four tenants with keys, for a module; emptied at its end. Returns the keys."""
    with django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "REDIS_URL", valkey_url)
        patch.setattr(celery_app.conf, "broker_url", valkey_url)
        with redis.Redis.from_url(valkey_url) as client:
            client.flushdb()
        printed = io.StringIO()
        call_command("seed_demo", json=True, model=[MODEL], stdout=printed)
        for alias in ("default", "tenant"):  # gateway, owners and tests are one process here
            connections[alias].pool.resize(0, 16)
        yield json.loads(printed.getvalue())["keys"]
        migrated.restore()


@pytest.fixture(scope="module")
def platform(books: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Serving from a thread of its own."""
    from gateway import asgi

    files = tmp_path_factory.mktemp("files")
    started, over = threading.Event(), threading.Event()
    found: list[Platform] = []

    async def serve() -> None:
        runtime = Runtime.from_settings()
        await runtime.start()
        gateway_runtime.set_current(runtime)
        try:
            async with serving(asgi.router) as base_url:
                found.append(Platform(base_url, books, files, runtime))
                started.set()
                await asyncio.to_thread(over.wait)
        finally:
            gateway_runtime.set_current(None)
            await runtime.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "RUBATO_FILES_DIR", str(files))
        patch.setattr(settings, "RUBATO_FILE_LIMIT_BYTES", 300_000)
        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="gateway", daemon=True)
        thread.start()
        assert started.wait(20)
        yield found[0]
        found[0].close()
        over.set()
        _joined(thread)


@pytest.fixture(scope="module")
def worker(books: dict[str, str], valkey_url: str, project_root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The real worker on a small simulated device."""
    command = [
        sys.executable,
        "-m",
        "gpu_worker",
        "--executor=simulated",
        "--device-profile=toy",
        f"--worker-id={WORKER_ID}",
    ]
    environment = {
        **os.environ,
        "REDIS_URL": valkey_url,
        "PYTHONPATH": f"{project_root}:{project_root / 'platform'}",
    }
    process = subprocess.Popen(command, cwd=project_root, env=environment)
    try:
        until(lambda: worker_is_ready(valkey_url), 60)
        yield process
    finally:
        process.terminate()
        process.wait(30)


class Owners:
    """Owners of batches, each in a thread with a gateway of its own, and Celery's part done by a thread."""

    def __init__(self, storage: Storage) -> None:
        self.now = timezone.now
        self._storage = storage
        self._over = threading.Event()
        self._celery = threading.Thread(target=self._do_tasks, name="tasks", daemon=True)
        self._celery.start()
        self._owners: list[tuple[threading.Thread, Callable[[], None]]] = []

    def start(self) -> None:
        ready = threading.Event()
        stopping: list[Callable[[], None]] = []

        async def own() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            stopping.append(lambda: loop.call_soon_threadsafe(stop.set))
            runtime = Runtime.from_settings()
            await runtime.start()
            ready.set()
            try:
                await BatchOwner(runtime, self._storage, lambda: self.now()).run(stop)
            finally:
                await runtime.stop()

        thread = threading.Thread(target=asyncio.run, args=(own(),), name="owner", daemon=True)
        thread.start()
        assert ready.wait(20)
        self._owners.append((thread, stopping[0]))

    def stop(self) -> None:
        """The owners that run; others may be started."""
        for thread, stop in self._owners:
            stop()
            _joined(thread)
        self._owners.clear()

    def close(self) -> None:
        self.stop()
        self._over.set()
        _joined(self._celery)

    def _do_tasks(self) -> None:
        """What beat asks for, without waiting for it."""
        while not self._over.wait(0.1):
            for batch in Batch.objects.filter(status="validating"):
                tasks.validate_batch(str(batch.id))
            for batch in Batch.objects.filter(status__in=["finalizing", "cancelling"]).exclude(outcome=""):
                tasks.finalise_batch(str(batch.id))
        connections.close_all()


def _joined(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def settle(books: dict[str, str], valkey_url: str) -> Callable[[], None]:
    """Writes into the books all that has been counted up to now."""

    def settle_all() -> None:
        reader = RedisUsageReader(valkey_url, keys=Keys(settings.RUBATO_REDIS_PREFIX))
        settler = Settler(reader, clock_s=time.monotonic, stopped_after=lambda _: True)
        while settler.settle_some():
            pass
        reader.close()

    return settle_all


@pytest.fixture
def owners(platform: Platform, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Owners]:
    """One owner, which a test may stop and start. It looks more often than one that has other things to do."""
    monkeypatch.setattr("gateway.run_batches.TAKE_S", 0.05)
    monkeypatch.setattr("gateway.batches.driving.RENEW_S", 0.1)
    until(lambda: bool(platform.runtime.loads))
    owners = Owners(platform.storage)
    owners.start()
    try:
        yield owners
    finally:
        owners.close()
        Batch.objects.all().delete()


def create(platform: Platform, lines: Iterable[dict[str, Any]], tenant: str = "bulk", **changes: Any) -> types.Batch:
    """Bulk's, of a file with these lines."""
    client = platform.client(tenant)
    file = client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    wanted: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **changes}
    return client.batches.create(input_file_id=file.id, **wanted)
