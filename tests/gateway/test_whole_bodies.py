"""Bodies of Django's routes: whole, in time and within the limits of ``/v1``, or refused before Django is asked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from asgiref.sync import async_to_sync

from billing import services as billing_services
from gateway import asgi
from gateway.errors import InvalidRequest
from gateway.supervision.platform_processes import SERVER_OPTIONS
from gateway.v1.bodies import AT_ONCE, OF_ONE_ADDRESS, Arrival, LateBodies, late_bodies
from gateway.whole_bodies import WholeBodies
from tenants.roles import Role
from tests.gateway.bad_requests import body, send
from tests.gateway.management_world import PRICES, ROOT, ROUTES, House, call, of_owner_and_operator
from tests.wire.scripted_redis import until

SENDING = [(method, route) for method, route, _ in ROUTES if method == "POST"]
FOR_ANYBODY = ("/account/login/", "/admin/login/", "/console/aurora/keys", "/nowhere")
CHUNKED = {"transfer-encoding": "chunked"}
LIMIT = 1_048_576


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return House("aurora", billing_services.set_prices(actor="tests", prices=PRICES).version)


@dataclass(slots=True)
class Reading:
    """In Django's place: reads the body, and remembers what it was told of it."""

    bodies: list[bytes] = field(default_factory=list)
    lengths: list[bytes | None] = field(default_factory=list)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        content, is_whole = b"", False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            content += message["body"]
            is_whole = not message["more_body"]
        self.bodies.append(content)
        self.lengths.append(dict(scope["headers"]).get(b"content-length"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@dataclass(slots=True)
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    content: bytes = b""

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


async def asked(
    application: Any, method: str, path: str, headers: dict[str, str], parts: Iterable[bytes], after: str = ""
) -> Answer:
    """One request whose body comes in these parts. ``after`` them comes the end; "silence"; or "leaves"."""
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages += {"": [{"type": "http.request", "body": b"", "more_body": False}], "silence": []}.get(
        after, [{"type": "http.disconnect"}]
    )
    coming, answer = iter(messages), Answer()

    async def receive() -> dict[str, Any]:
        for message in coming:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def keep(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], dict(message["headers"])
        answer.content += message.get("body", b"")

    encoded = [(b"host", b"localhost"), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": encoded}
    await application({**scope, "client": ("192.0.2.1", 1), "server": ("localhost", 80)}, receive, keep)
    return answer


def by_owner(house: House) -> dict[str, str]:
    return {"authorization": f"Bearer {house.management_key(Role.OWNER)}", "content-type": "application/json"}


NO_JSON = [
    *({"content-type": f"application/json; charset={name}"} for name in ("latin1", "utf-16", "nonsense", "")),
    *({"content-type": "text/plain"}, {"content-encoding": "gzip"}),
]


@pytest.mark.parametrize("announced", NO_JSON, ids=lambda headers: " ".join(headers.values()))
def test_no_management_route_reads_a_body_that_is_announced_as_no_json_in_utf_8(
    house: House, announced: dict[str, str]
) -> None:
    """As everywhere under /v1, and unread: who waits for our word to send is never given it."""
    for method, route in SENDING:
        headers = by_owner(house) | CHUNKED | {"expect": "100-continue"} | announced
        path = f"{ROOT}/{route.format(**house.ids())}"
        answer = async_to_sync(asked)(asgi.http, method, path, headers, [], "silence")
        assert (answer.status, answer.error()["code"]) == (415, "unsupported_media_type")


def test_a_body_of_the_management_api_may_say_that_it_is_in_utf_8(house: House) -> None:
    headers = by_owner(house) | CHUNKED | {"content-type": 'application/json; charset="UTF-8"'}
    sent = json.dumps({"name": "Café"}, ensure_ascii=False).encode()
    answer = async_to_sync(asked)(asgi.http, "POST", f"{ROOT}/projects", headers, [sent])
    assert (answer.status, json.loads(answer.content)["name"]) == (201, "Café")


def test_every_management_route_reads_a_body_that_does_not_announce_its_length(house: House) -> None:
    for method, route in SENDING:
        path = f"{ROOT}/{route.format(**house.ids())}"
        content = b'{"colour": "red"}'
        for headers in (CHUNKED, {"content-length": str(len(content))}):
            parts = [content[:5], content[5:6], content[6:]]
            answer = async_to_sync(asked)(asgi.http, method, path, by_owner(house) | headers, parts)
            assert (answer.status, answer.error()["param"]) == (400, "colour"), (route, headers)


def test_a_key_rotated_by_a_chunked_body_has_the_grace_that_it_says(house: House) -> None:
    path = f"{ROOT}/api_keys/{house.ids()['key']}/rotate"
    parts = [b'{"grace_sec', b'onds": 60}']
    answer = async_to_sync(asked)(asgi.http, "POST", path, by_owner(house) | CHUNKED, parts)
    made = json.loads(answer.content)
    assert made["previous_secret_until"] - made["rotated_at"] == 60


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk_test_nobody"}], ids=["no key", "a bad key"])
def test_no_body_for_the_management_api_is_read_from_who_has_no_key(house: House, headers: dict[str, str]) -> None:
    django = Reading()
    for method, route in SENDING:
        path = f"{ROOT}/{route.format(**house.ids())}"
        answer = async_to_sync(asked)(WholeBodies(django), method, path, headers | CHUNKED, [b"{}"])
        assert (answer.status, answer.error()["code"]) == (401, "invalid_api_key")
        assert answer.headers[b"www-authenticate"] == b"Bearer"
        assert re.fullmatch(rb"req_[0-9a-f]{32}", answer.headers[b"x-request-id"])
        text = headers.get("authorization", "").removeprefix("Bearer ") or None
        assert answer.error() == call(text, method, route.format(**house.ids())).json()["error"]
    assert not django.bodies


SPOILT = [
    (408, {}, [b"{"], "silence"),
    (413, {"content-length": str(LIMIT + 1)}, [], "silence"),
    (413, CHUNKED, [b" " * LIMIT, b" "], "silence"),
    (400, CHUNKED, [b"{"], "leaves"),
]


@pytest.mark.parametrize(("status", "headers", "parts", "after"), SPOILT, ids=["slow", "announced", "large", "broken"])
@pytest.mark.parametrize("path", [*FOR_ANYBODY, f"{ROOT}/projects"])
def test_a_body_that_is_slow_large_or_broken_is_refused_in_the_shape_of_its_route(
    house: House, path: str, status: int, headers: dict[str, str], parts: list[bytes], after: str
) -> None:
    django = Reading()
    sent = by_owner(house) | CHUNKED | headers
    answer = async_to_sync(asked)(WholeBodies(django, body_s=0.05), "POST", path, sent, parts, after)
    assert answer.status == status
    assert not django.bodies
    if path.startswith(ROOT):
        assert answer.error()["code"] in ("request_timeout", "request_too_large", "invalid_request")
    else:
        assert answer.headers[b"content-type"].startswith(b"text/html")
        assert b"Nothing was changed" in answer.content


@pytest.mark.parametrize("path", FOR_ANYBODY)
async def test_django_sees_the_whole_body_and_its_length(path: str) -> None:
    django = Reading()
    for headers, parts in ((CHUNKED, [b"ab", b"c"]), ({"content-length": "3"}, [b"abc"]), ({}, [])):
        await asked(WholeBodies(django), "POST", path, headers, parts)
    assert django.bodies == [b"abc", b"abc", b""]
    assert django.lengths == [b"3", b"3", None]


def test_only_a_member_sends_a_page_more_than_a_body_may_have(house: House, settings: Any) -> None:
    settings.RUBATO_BODY_LIMIT_BYTES, settings.RUBATO_FILE_LIMIT_BYTES = 100, 1_000
    session = of_owner_and_operator(house).cookies[settings.SESSION_COOKIE_NAME].value
    django = Reading()
    cases = [
        ("/console/aurora/batches", session, 1_000, 200),
        ("/console/aurora/batches", session, 100_000, 413),  # a form may have 64 KiB besides its file
        ("/console/aurora/batches", "", 1_000, 413),
        ("/console/aurora/batches", "nobody", 1_000, 413),
        ("/console/stranger/batches", session, 1_000, 413),
        ("/console/aurora/keys", session, 1_000, 413),
    ]
    for path, cookie, size, status in cases:
        headers = CHUNKED | {"cookie": f"{settings.SESSION_COOKIE_NAME}={cookie}"}
        answer = async_to_sync(asked)(WholeBodies(django), "POST", path, headers, [b"x" * size])
        assert answer.status == status, (path, cookie)
    assert list(map(len, django.bodies)) == [1_000]


def test_late_bodies_are_counted_by_address_and_all_together() -> None:
    late = LateBodies(at_once=3, of_one_address=2)
    assert [late.take(address) for address in ("a", "a", "a", "b", "b", "c")] == [True, True, False, True, False, False]
    late.release("a")
    assert [late.take(address) for address in ("c", "a")] == [True, False]
    for address in ("a", "b", "c"):
        late.release(address)
    assert [late.num_of(address) for address in ("a", "b", "c")] == [0, 0, 0]


async def test_a_body_is_counted_while_it_is_late_and_no_longer() -> None:
    late = LateBodies(at_once=1, of_one_address=1, late_s=0.0)
    with Arrival("a", late) as first:
        async with first.within(9.0):
            await until(lambda: late.num_of("a") == 1)
        for address in ("a", "b"):
            with pytest.raises(InvalidRequest, match="late just now"), Arrival(address, late) as second:
                async with second.within(9.0):
                    await asyncio.Event().wait()
        with Arrival("a", LateBodies(at_once=0)) as at_once:
            async with at_once.within(9.0):
                pass
    assert late.num_of("a") == 0


@pytest.fixture
def full() -> Iterator[None]:
    """As many bodies of the loopback address are late as may be."""
    for _ in range(OF_ONE_ADDRESS):
        assert late_bodies.take("127.0.0.1")
    yield
    for _ in range(OF_ONE_ADDRESS):
        late_bodies.release("127.0.0.1")


HALF_SENT = b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"


async def test_a_late_body_too_many_is_503_and_who_sends_at_once_or_nothing_is_served(world: Any, full: None) -> None:
    host, port = world.base_url.removeprefix("http://").split(":")
    key = f"authorization: Bearer {world.keys['aurora']}\r\n".encode()
    for path in (b"/v1/chat/completions", b"/account/login/"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST " + path + HALF_SENT + key + b"\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in head
        writer.close()
    assert (await send(world, body(colour="red"))).json()["error"]["param"] == "colour"
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        answer = await client.get("/v1/models", headers={"authorization": f"Bearer {world.keys['aurora']}"})
    assert answer.status_code == 200


async def test_no_body_is_counted_longer_than_it_takes(world: Any) -> None:
    for content in (body(), b"{", b"x" * 2_000_000):
        await send(world, content)
    assert late_bodies.num_of("127.0.0.1") == 0


def test_bodies_leave_connections_of_the_server_to_others() -> None:
    (connections,) = [int(one.partition("=")[2]) for one in SERVER_OPTIONS if one.startswith("--backpressure=")]
    assert connections >= 2 * AT_ONCE
    assert 8 * OF_ONE_ADDRESS <= AT_ONCE
