"""Who may look: the front page is everybody's, the live page and its socket are for staff on our own pages only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.routing import URLRouter
from django.contrib.auth.models import User
from django.db import OperationalError
from django.test import Client

from gateway import runtime
from gateway.console import consumers
from gateway.console.consumers import GOING_AWAY, NOT_SIGNED_IN, TRY_AGAIN, LiveConsumer, same_origin
from gateway.console.feed import LiveFeed
from gateway.console.routing import websocket_urlpatterns
from gateway.loads import loads
from wire.messages import LoadSnapshot

HOST = b"rubato.example:8000"
ORIGIN = b"http://rubato.example:8000"


async def no_workers() -> Sequence[LoadSnapshot]:
    return ()


@pytest.fixture
def quiet_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveConsumer, "feed", LiveFeed(no_workers))


def signed_in(*, is_staff: bool, name: str = "somebody") -> Client:
    user = User.objects.create_user(name, password="a long enough one", is_staff=is_staff)
    client = Client()
    client.force_login(user)
    return client


class Socket(ApplicationCommunicator):
    """The live page's socket, spoken to as a server would (Channels' own client wants daphne)."""

    def __init__(self, client: Client | None, origin: bytes | None = ORIGIN) -> None:
        headers = [(b"host", HOST)]
        if origin is not None:
            headers.append((b"origin", origin))
        if client is not None:
            headers.append((b"cookie", f"sessionid={client.cookies['sessionid'].value}".encode()))
        path = "/operator/live/stream"
        scope = {"type": "websocket", "path": path, "headers": headers, "query_string": b"", "subprotocols": []}
        super().__init__(URLRouter(websocket_urlpatterns), scope)

    async def connect(self) -> bool:
        """Whether the handshake was accepted."""
        await self.send_input({"type": "websocket.connect"})
        return bool((await self.receive_output(timeout=3))["type"] == "websocket.accept")

    async def frame(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads((await self.receive_output(timeout=3))["text"])
        return frame

    async def close_code(self) -> int:
        """The code of the close that must come next."""
        message = await self.receive_output(timeout=3)
        assert message["type"] == "websocket.close", message
        return int(message["code"])

    async def leave(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1001})
        await self.wait()


@pytest.mark.parametrize(
    ("origin", "is_same"),
    [
        (ORIGIN, True),
        (b"http://RUBATO.example:8000", True),
        (b"http://rubato.example", False),
        (b"http://rubato.example:8000.evil.example", False),
        (b"http://evil.example", False),
        (b"null", False),
        (b"", False),
    ],
)
def test_a_page_of_another_origin_is_a_stranger(origin: bytes, is_same: bool) -> None:
    assert same_origin({b"host": HOST, b"origin": origin}) is is_same


def test_an_origin_that_the_operator_trusts_may_look(settings) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["https://desk.example"]

    assert same_origin({b"host": HOST, b"origin": b"https://desk.example"})


@pytest.mark.parametrize("origin", [None, b"http://evil.example"])
async def test_a_handshake_from_elsewhere_is_refused(
    transactional_db: None, quiet_feed: None, origin: bytes | None
) -> None:
    client = await sync_to_async(signed_in)(is_staff=True)

    assert not await Socket(client, origin).connect()


async def test_staff_gets_frames(transactional_db: None, quiet_feed: None) -> None:
    socket = Socket(await sync_to_async(signed_in)(is_staff=True))
    await socket.connect()

    frame = await socket.frame()

    assert frame["workers"] == []
    assert frame["bus_up"] is True
    await socket.leave()


async def test_a_heartbeat_of_the_page_needs_no_answer_and_does_no_harm(
    transactional_db: None, quiet_feed: None
) -> None:
    socket = Socket(await sync_to_async(signed_in)(is_staff=True))
    await socket.connect()
    await socket.frame()

    await socket.send_input({"type": "websocket.receive", "text": "here"})

    assert (await socket.frame())["workers"] == []
    await socket.leave()


async def test_somebody_without_a_session_is_told_to_sign_in(transactional_db: None, quiet_feed: None) -> None:
    socket = Socket(None)
    await socket.connect()

    assert await socket.close_code() == NOT_SIGNED_IN


async def test_a_user_who_is_no_operator_sees_nothing(transactional_db: None, quiet_feed: None) -> None:
    socket = Socket(await sync_to_async(signed_in)(is_staff=False))
    await socket.connect()

    assert await socket.close_code() == NOT_SIGNED_IN


async def test_the_picture_ends_when_the_operator_signs_out_elsewhere(
    transactional_db: None, quiet_feed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_PERIOD_S", 0)
    client = await sync_to_async(signed_in)(is_staff=True)
    socket = Socket(client)
    await socket.connect()
    await sync_to_async(client.logout)()

    async with asyncio.timeout(5):
        while (message := await socket.receive_output(timeout=3))["type"] != "websocket.close":
            assert message["type"] == "websocket.send"

    assert message["code"] == NOT_SIGNED_IN


async def test_the_picture_goes_on_while_the_database_is_away(
    transactional_db: None, quiet_feed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just then an operator looks."""
    monkeypatch.setattr(consumers, "RECHECK_PERIOD_S", 0.01)
    client = await sync_to_async(signed_in)(is_staff=True)
    socket, late = Socket(client), Socket(client)
    await socket.connect()
    asked: list[str] = []

    def away(session_key: str) -> None:
        asked.append(session_key)
        raise OperationalError("no answer")

    monkeypatch.setattr(consumers, "user_of", away)
    async with asyncio.timeout(10):
        while len(asked) < 3:
            await socket.frame()
    assert (await socket.frame())["bus_up"] is True
    await late.connect()
    assert await late.close_code() == TRY_AGAIN
    await socket.leave()


async def test_the_picture_ends_when_the_gateway_goes_away(
    transactional_db: None, quiet_feed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = SimpleNamespace(is_going=asyncio.Event())
    monkeypatch.setattr(runtime, "current", lambda: going)
    socket = Socket(await sync_to_async(signed_in)(is_staff=True))
    await socket.connect()
    await socket.frame()
    going.is_going.set()

    while (message := await socket.receive_output(timeout=3))["type"] == "websocket.send":
        pass

    assert (message["type"], message["code"]) == ("websocket.close", GOING_AWAY)


@pytest.mark.parametrize("page", ["/operator/live", "/operator/policy/classes?q=a", "/admin/tenants/tenant/"])
def test_there_is_one_log_in_for_all_and_it_leads_back(transactional_db: None, page: str) -> None:
    User.objects.create_superuser("ops", password="a long enough one")
    client = Client()
    door = client.get(page, follow=True)
    address, _ = door.redirect_chain[-1]
    assert address == f"/account/login/?next={quote(page)}"
    answer = client.post(address, {"login": "ops", "password": "a long enough one", "next": page})
    assert (answer.status_code, answer["Location"]) == (302, page)


def test_who_is_no_operator_is_told_so_and_not_sent_round(transactional_db: None) -> None:
    for page in ("/operator/live", "/operator/policy/", "/admin/"):
        found = signed_in(is_staff=False, name=f"visitor{len(page)}").get(page, follow=True)
        assert found.status_code == 403
        assert "For operators" in found.content.decode()


def test_the_log_in_leads_to_no_other_site(transactional_db: None) -> None:
    for client in (Client(), signed_in(is_staff=True)):
        found = client.get("/admin/login/?next=https://elsewhere.example/")
        assert found["Location"] in ("/account/login/?next=/admin/", "/admin/")


@pytest.mark.parametrize("page", ["/nowhere", "/console/nobody/", "/operator/policy/versions/99"])
def test_a_page_that_is_not_there_says_so_in_our_own_words(transactional_db: None, page: str) -> None:
    found = signed_in(is_staff=True).get(page)
    assert found.status_code in (403, 404)
    assert "<h1>" in found.content.decode()
    assert "To the front page" in found.content.decode()


def test_the_live_page_runs_our_own_files_only(transactional_db: None) -> None:
    response = signed_in(is_staff=True).get("/operator/live")

    assert response.status_code == 200
    policy = response["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert b"<script>" not in response.content
    assert b" style=" not in response.content


def test_the_front_page_gives_the_readers_own_address() -> None:
    page = Client().get("/", headers={"host": "localhost:8123"}).content.decode()

    assert "http://localhost:8123/v1/chat/completions" in page
    assert "base_url=&quot;http://localhost:8123/v1&quot;" in page or 'base_url="http://localhost:8123/v1"' in page


def test_the_front_page_says_when_no_worker_answers() -> None:
    assert "No worker is answering" in Client().get("/").content.decode()


def test_the_front_page_names_the_model_that_is_served() -> None:
    class Load:
        model = "smollm2-135m"

    async def one_worker() -> Sequence[Load]:
        return [Load()]

    loads.read_from(one_worker)  # type: ignore[arg-type]
    try:
        page = Client().get("/").content.decode()
    finally:
        loads.read_from(None)

    assert "&quot;model&quot;: &quot;smollm2-135m&quot;" in page or '"model": "smollm2-135m"' in page
    assert "No worker is answering" not in page


def test_a_host_that_is_not_ours_gets_no_address_to_copy() -> None:
    assert Client().get("/", headers={"host": "evil.example"}).status_code == 400


def test_static_files_come_with_their_type_and_the_policy() -> None:
    response = Client().get("/static/console/live.js")

    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/javascript")
    assert response["Content-Security-Policy"]
