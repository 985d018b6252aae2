"""A real Chromium in front of the real pages, served by the production server, with a stage in the workers' place."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.test import Client
from granian.constants import Interfaces
from granian.server.embed import Server
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright
from pytest_django import DjangoDbBlocker

from gateway.celery import app as celery_app
from gateway.console.consumers import LiveConsumer
from gateway.console.feed import LiveFeed
from gateway.console.routing import websocket_urlpatterns
from gateway.loads import loads
from tests.browser.product import Product, running
from tests.loads import quiet_load
from wire.messages import LoadSnapshot

expect.set_options(timeout=30_000)  # a page may be late on a busy machine; what must be quick is measured where it is

IDLE = quiet_load(
    model="smollm2-135m-instruct",
    last_step_age_us=40_000,
    step=1_200,
    num_blocks=512,
    num_free_blocks=512,
    num_host_blocks=256,
    num_free_host_blocks=256,
    num_slots=16,
    num_free_slots=16,
    policy_version=3,
)


@dataclass
class Stage:
    """What the Bus would say. Always: each ``play`` is a fresh snapshot, as a worker's next one would be."""

    now: LoadSnapshot = IDLE
    is_repeating: bool = True  # a living worker says something new four times a second
    spoken: list[LoadSnapshot] = field(default_factory=list)

    def play(self, **changes: object) -> None:
        self.now = replace(self.now, step=self.now.step + 1, **changes)
        self.spoken = [self.now]

    async def read(self) -> Sequence[LoadSnapshot]:
        if self.is_repeating and self.spoken:
            self.spoken = [replace(self.spoken[0], busy_us_total=self.spoken[0].busy_us_total + 1)]
        return self.spoken


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Module scope: Playwright's loop must be gone before tests of other folders run loops of their own."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no Chromium here: `apt-get install chromium` brings the one these tests use")
    with sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        # Playwright's loop runs in this thread, and Django takes that for an async view; there is none here.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        chromium = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def product(
    django_db_setup: None,
    migrated: Any,
    django_db_blocker: DjangoDbBlocker,
    valkey_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Product]:
    """The whole gateway, for pages that ask it for something; in place of ``site``, which serves pages alone."""
    with django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "REDIS_URL", valkey_url)
        patch.setattr(settings, "RUBATO_FILES_DIR", str(tmp_path_factory.mktemp("files")))
        patch.setattr(celery_app.conf, "broker_url", valkey_url)
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # as for ``browser``
        with running(valkey_url) as product:
            yield product
        migrated.restore()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """The workers' place, in front of the feed that the page really uses."""
    played = Stage()
    monkeypatch.setattr(LiveConsumer, "feed", LiveFeed(loads))
    loads.read_from(played.read)
    yield played
    loads.read_from(None)


class SiteThread:
    """Granian in a thread with a loop of its own, on a free port of the loopback. Always: stopped when the test is,
    after what it had begun: a view outlives the reader who left, and Django leaves the body's file open when cut short.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        routes = {"http": get_asgi_application(), "websocket": URLRouter(websocket_urlpatterns)}
        self._loop = asyncio.get_running_loop()
        self._server = Server(
            ProtocolTypeRouter(routes), port=self.port, interface=Interfaces.ASGINL, log_enabled=False
        )
        await self._server.serve()
        if begun := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(begun, timeout=5)

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the site did not come up"
                time.sleep(0.02)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@pytest.fixture
def site(transactional_db: None) -> Iterator[str]:
    server = SiteThread()
    server.start()
    yield server.base_url
    server.stop()


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """A fresh visitor. Fails the test when the page logged an error, broke its own policy or missed a file."""
    context = browser.new_context(base_url=site, viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        is_of_the_page = message.text.startswith("Failed to load") and message.location["url"] == opened.url
        if message.type == "error" and not is_of_the_page:  # a page may say that it is not there
            complaints.append(message.text)

    opened.on("console", heard)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    context.close()
    assert complaints == []


def sign_in(context: BrowserContext, site: str, *, is_staff: bool = True) -> None:
    """A session as the admin's own log-in would make it."""
    from django.contrib.auth.models import User

    user = User.objects.create_user("ops" if is_staff else "visitor", password="a long enough one", is_staff=is_staff)
    client = Client()
    client.force_login(user)
    context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])


@pytest.fixture
def operator(page: Page, site: str) -> Page:
    sign_in(page.context, site)
    return page
