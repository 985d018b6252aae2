"""Whose address counts: a stranger's wrong passwords close a name to nobody else, also behind a trusted proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.cache import cache
from django.test import Client

from gateway import asgi
from gateway.client_address import behind_proxies
from gateway.v1.http import Exchange
from tests.gateway.test_whole_bodies import asked

SOCKET = "192.0.2.1"  # where ``asked`` connects from
PASSWORD, CSRF = "a long enough one", "a" * 32
LIMIT_OF_A_NAME, LIMIT_OF_AN_ADDRESS = 5, 10
CLOSED = "Too many failed login attempts"


@pytest.fixture(autouse=True)
def nobody_failed_yet() -> Iterator[None]:
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def ann(transactional_db: None, settings: Any) -> User:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return User.objects.create_user("ann", "ann@aurora.example", PASSWORD)


def is_let_in(address: str, password: str, login: str = "ann") -> bool:
    answer = Client(REMOTE_ADDR=address).post("/account/login/", {"login": login, "password": password})
    return answer.status_code == 302


@pytest.mark.parametrize("login", ["ann", "ANN", "ann@aurora.example"])
def test_wrong_passwords_from_elsewhere_close_nobodys_name(ann: User, login: str) -> None:
    for _ in range(LIMIT_OF_A_NAME + 1):
        assert not is_let_in("127.0.0.5", "wrong", login)
    assert not is_let_in("127.0.0.5", PASSWORD, login)  # where they came from, not even the right one
    assert is_let_in("127.0.0.9", PASSWORD, login)


def test_an_address_under_the_same_ipv6_prefix_is_the_same_stranger(ann: User) -> None:
    for number in range(LIMIT_OF_A_NAME):
        assert not is_let_in(f"2001:db8::{number:x}", "wrong")
    assert not is_let_in("2001:db8::ffff", PASSWORD)
    assert is_let_in("2001:db8:0:1::1", PASSWORD)


def sign_in(forwarded: str, password: str, login: str = "ann") -> int:
    form = urlencode({"login": login, "password": password, "csrfmiddlewaretoken": CSRF}).encode()
    headers = {"content-type": "application/x-www-form-urlencoded", "cookie": f"csrftoken={CSRF}"}
    headers |= {"content-length": str(len(form)), "x-forwarded-for": forwarded}
    answer = async_to_sync(asked)(asgi.application, "POST", "/account/login/", headers, [form])
    assert answer.status in (200, 302)
    assert answer.status == 302 or b"not correct" in answer.content or CLOSED.encode() in answer.content
    return answer.status


def test_behind_a_trusted_proxy_one_stranger_keeps_nobody_else_out(ann: User, settings: Any) -> None:
    settings.RUBATO_TRUSTED_PROXIES = 1
    for number in range(LIMIT_OF_AN_ADDRESS + 1):
        assert sign_in(f"203.0.113.{number}, 198.51.100.7", "wrong", f"name{number}") == 200
    assert sign_in("198.51.100.9, 198.51.100.7", PASSWORD) == 200  # what stands before the proxy's word is the client's
    assert sign_in("198.51.100.9", PASSWORD) == 302


def test_one_stranger_on_ipv4_keeps_no_other_out_where_ipv4_is_written_as_ipv6(ann: User, settings: Any) -> None:
    settings.RUBATO_TRUSTED_PROXIES = 1
    for number in range(LIMIT_OF_AN_ADDRESS):
        assert sign_in("::ffff:198.51.100.7", "wrong", f"name{number}") == 200
    assert sign_in("198.51.100.7", PASSWORD) == 200
    assert sign_in("::ffff:198.51.100.9", PASSWORD) == 302


def test_without_a_trusted_proxy_the_header_moves_nobody(ann: User) -> None:
    for number in range(LIMIT_OF_AN_ADDRESS):
        assert sign_in(f"203.0.113.{number}", "wrong", f"name{number}") == 200
    assert sign_in("198.51.100.9", PASSWORD) == 200


@pytest.mark.parametrize(
    ("num_proxies", "written", "address"),
    [
        (0, ["198.51.100.7"], SOCKET),
        (1, [], SOCKET),
        (1, ["198.51.100.7"], "198.51.100.7"),
        (1, ["203.0.113.1, 198.51.100.7"], "198.51.100.7"),
        (1, ["203.0.113.1", "198.51.100.7"], "198.51.100.7"),
        (2, ["203.0.113.1, 198.51.100.7,10.0.0.1"], "198.51.100.7"),
        (2, ["198.51.100.7"], SOCKET),
        (1, ["198.51.100.7:4711"], "198.51.100.7"),
        (1, ["2001:DB8::1"], "2001:db8::1"),
        (1, ["[2001:db8::1]:4711"], "2001:db8::1"),
        (1, ["::ffff:198.51.100.7"], "198.51.100.7"),
        (1, ["::FFFF:c633:6407"], "198.51.100.7"),
        (1, ["::ffff:198.51.100.7:4711"], "198.51.100.7"),
        (1, ["[::ffff:198.51.100.7]"], "198.51.100.7"),
        (1, ["[::ffff:198.51.100.7]:4711"], "198.51.100.7"),
        (1, ["unknown"], SOCKET),
        (1, [""], SOCKET),
        (1, ["198.51.100.7, "], SOCKET),
        (-1, ["203.0.113.1, 198.51.100.7"], SOCKET),
    ],
)
def test_the_address_is_the_one_that_the_outermost_trusted_proxy_saw(
    num_proxies: int, written: list[str], address: str
) -> None:
    headers = [(b"X-Forwarded-For", value.encode()) for value in written]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "client": (SOCKET, 1)}
    seen = behind_proxies(scope, num_proxies)
    assert Exchange(seen, None, None).address == address  # type: ignore[arg-type]  # nothing is read or sent
    assert scope["client"] == (SOCKET, 1)


@pytest.mark.parametrize("num_proxies", [0, 1])
@pytest.mark.parametrize(
    ("socket", "address"),
    [
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("::ffff:c633:6407", "198.51.100.7"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("198.51.100.7", "198.51.100.7"),
        ("/run/rubato.sock", "/run/rubato.sock"),
    ],
)
def test_an_ipv4_address_that_a_socket_for_both_kinds_writes_as_ipv6_is_itself(
    num_proxies: int, socket: str, address: str
) -> None:
    scope = {"type": "http", "headers": [], "client": (socket, 4711)}
    assert behind_proxies(scope, num_proxies)["client"] == (address, 4711)
    assert scope["client"] == (socket, 4711)


@pytest.mark.parametrize("client", [{}, {"client": None}])
def test_a_client_that_the_server_does_not_know_stays_unknown(client: dict[str, None]) -> None:
    assert behind_proxies({"type": "http", "headers": [], **client}, 1).get("client") is None


async def test_what_counts_slow_bodies_sees_that_address(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RUBATO_TRUSTED_PROXIES = 1
    seen: list[str] = []

    class Watched(asgi.WholeBodies):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(Exchange(scope, receive, send).address)
            await super().__call__(scope, receive, send)

    monkeypatch.setattr(asgi, "django_application", Watched(asgi.django_handler))
    await asked(asgi.application, "GET", "/nowhere", {"x-forwarded-for": "198.51.100.7"}, [])
    assert seen == ["198.51.100.7"]
