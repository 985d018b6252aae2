"""The whole gateway behind a loopback port, on real PostgreSQL and Valkey, with a worker that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator

import redis
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections
from django.test import Client
from playwright.sync_api import BrowserContext

from gateway import runtime as gateway_runtime
from gateway.runtime import Runtime
from tenants import members
from tenants.models import PolicyVersion, Tenant
from tenants.roles import Role
from tests.gateway.conftest import serving
from tests.gateway.fake_worker import MODEL, FakeWorker, Script
from wire.redis_keys import Keys


class Product:
    """Always: serves from a thread of its own, with the tenants of the demo."""

    def __init__(self, redis_url: str, keys: dict[str, str]) -> None:
        self.keys = keys
        self.worker = FakeWorker(redis_url, Keys(settings.RUBATO_REDIS_PREFIX))
        self.base_url = ""
        self._started, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="gateway", daemon=True)
        self.runtime: Runtime

    async def _serve(self) -> None:
        from gateway import asgi

        self.runtime = Runtime.from_settings()
        await self.runtime.start()
        gateway_runtime.set_current(self.runtime)
        try:
            async with serving(asgi.router) as self.base_url:
                self._started.set()
                await asyncio.to_thread(self._over.wait)
        finally:
            gateway_runtime.set_current(None)
            await self.runtime.stop()

    def start(self) -> None:
        self.worker.start()
        self._thread.start()
        assert self._started.wait(20), "the gateway did not come up"

    def stream(self, answer: bytes, tokens_per_s: int) -> None:
        """The next request gets this, a token a byte, at about this rate."""
        tokens_per_step = 4
        self.worker.script.answer, self.worker.script.tokens_per_step = answer, tokens_per_step
        self.worker.step_s, self.worker.listen_s = tokens_per_step / tokens_per_s - 0.001, 0.0

    def until_policy(self) -> None:
        """The gateway has what was saved last."""
        newest, deadline = PolicyVersion.objects.count(), time.monotonic() + 10
        while (view := self.runtime.policy.view) is None or view.version < newest:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def begin_again(self) -> None:
        """For the next test: a worker as it was at first."""
        self.worker.script, self.worker.step_s, self.worker.listen_s = Script(), 0.0, 0.001
        self.worker.submits.clear()
        self.worker.cancels.clear()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.worker.stop()


@contextlib.contextmanager
def running(redis_url: str) -> Iterator[Product]:
    """Seeds the demo's tenants first. Whoever calls empties the tables afterwards."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    printed = io.StringIO()
    call_command("seed_demo", json=True, model=[MODEL], stdout=printed)
    for alias in ("default", "tenant"):  # gateway and tests are one process here
        connections[alias].pool.resize(0, 16)
    product = Product(redis_url, json.loads(printed.getvalue())["keys"])
    product.start()
    try:
        yield product
    finally:
        product.stop()


def join(context: BrowserContext, site: str, slug: str, role: Role) -> User:
    """A person who is a member of the tenant, made at the first time, and signed in."""
    name = f"{role.value}-of-{slug}"
    user = User.objects.filter(username=name).first()
    if user is None:
        user = User.objects.create_user(name, f"{name}@example.com", "a long enough one")
        tenant = Tenant.objects.get(slug=slug)
        members.add_member(actor="tests", tenant=tenant, user=user, email=user.email, role=role)
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])
    return user
