"""One gateway for a whole module of tests: real keys and rows, files in a folder of the test's own, no worker."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import redis
from django.conf import settings
from django.core.management import call_command
from openai import OpenAI
from pytest_django import DjangoDbBlocker

from gateway import runtime as gateway_runtime
from gateway.batches.services import Owner
from gateway.batches.storage import Storage
from gateway.runtime import Runtime
from tenants.models import ApiKey
from tests.gateway.conftest import serving

MODEL = "simulated"


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

    def owner(self, tenant: str = "aurora") -> Owner:
        key = ApiKey.objects.get(public_id=self.keys[tenant].split("_")[2])
        return Owner(tenant_id=key.tenant_id, project_id=key.project_id, key_id=key.id, key_public_id=key.public_id)

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


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll for something that another thread or process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def books(django_db_setup: None, django_db_blocker: DjangoDbBlocker, valkey_url: str) -> Iterator[dict[str, str]]:
    """The four tenants with keys, for a module; emptied at its end. Returns the keys."""
    with django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "REDIS_URL", valkey_url)
        with redis.Redis.from_url(valkey_url) as client:
            client.flushdb()
        printed = io.StringIO()
        call_command("seed_demo", json=True, model=[MODEL], stdout=printed)
        yield json.loads(printed.getvalue())["keys"]
        call_command("flush", database="owner", interactive=False, verbosity=0)


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
        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="gateway")
        thread.start()
        assert started.wait(20)
        yield found[0]
        found[0].close()
        over.set()
        thread.join()
