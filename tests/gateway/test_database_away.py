"""A database that restarts: what was connected before is noticed before anybody is answered, and an outage is a 503."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, OperationalError, connections
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test import Client
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout

from gateway.auth import KeyTable
from gateway.database_threads import DatabaseThreads
from gateway.databases import pool_size
from gateway.postgresql import POOL_OPTIONS
from tenants.models import Tenant
from tenants.roles import Role
from tests.gateway.management_world import ROOT, House, open_houses

pytestmark = pytest.mark.django_db(transaction=True)
NUM_IDLE = pool_size()  # as many as a pool holds
POOLED = ("default", "tenant")


@pytest.fixture
def house(settings: Any) -> House:
    aurora = open_houses(settings)["aurora"]
    connections.close_all()
    return aurora


def fill_pools() -> None:
    """With idle connections, as in a gateway that has had some work."""
    met = threading.Barrier(NUM_IDLE)

    def connect() -> None:
        for alias in POOLED:
            connections[alias].ensure_connection()
        met.wait(10)
        connections.close_all()

    connections.close_all()
    with ThreadPoolExecutor(NUM_IDLE) as threads:
        for done in [threads.submit(connect) for _ in range(NUM_IDLE)]:
            done.result()


@pytest.fixture
def cut(database_urls: dict[str, str]) -> Callable[[], None]:
    """Ends every connection that any role has, as a restart does. Pools are full of idle ones before."""

    def cut_all() -> None:
        fill_pools()
        for url in database_urls.values():
            with psycopg.connect(url, autocommit=True) as other:
                other.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE usename = current_user AND pid <> pg_backend_pid()"
                )

    return cut_all


def get(path: str, key: str = "") -> Any:
    client = Client(raise_request_exception=False)
    answer = client.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})
    connections.close_all()  # as every request leaves it
    return answer


def test_after_a_restart_of_the_database_every_call_of_the_management_api_is_answered(
    house: House, cut: Callable[[], None]
) -> None:
    key = house.management_key(Role.ADMIN)
    cut()
    answers = [get(f"{ROOT}/{route}", key) for route in ("projects", "users", "statements", "usage/export") * NUM_IDLE]
    assert {answer.status_code for answer in answers} == {200}


def test_after_a_restart_of_the_database_every_page_is_answered(house: House, cut: Callable[[], None]) -> None:
    client = Client(raise_request_exception=False)
    client.force_login(house.member.user)
    cut()
    for _ in range(NUM_IDLE + 1):
        assert client.get(f"/console/{house.tenant.slug}/").status_code == 200
        connections.close_all()


async def test_after_a_restart_of_the_database_threads_beside_the_loop_and_the_table_of_keys_go_on(
    house: House, cut: Callable[[], None], database_urls: dict[str, str]
) -> None:
    threads, table = DatabaseThreads(), KeyTable(database_urls["default"])
    await table.open()
    try:
        await asyncio.gather(*(table.find("none") for _ in range(NUM_IDLE)))
        await asyncio.to_thread(cut)
        for _ in range(NUM_IDLE + 1):
            assert await threads.run(Tenant.objects.count) == 2
            assert await table.find("none") is None
    finally:
        threads.close()
        await table.close()


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
@pytest.mark.parametrize("path", [f"{ROOT}/projects", f"{ROOT}/usage/export", "/account/login/", "/console/"])
def test_while_the_database_is_away_whoever_comes_is_told_to_come_again(
    house: House, monkeypatch: pytest.MonkeyPatch, error: type[Exception], path: str
) -> None:
    key = house.management_key(Role.ADMIN)
    client = Client(raise_request_exception=False)
    client.force_login(house.member.user)
    connections.close_all()

    def refuse(*_: object) -> None:
        raise error("the server closed the connection")

    monkeypatch.setattr(DatabaseWrapper, "connect", refuse)
    is_api = path.startswith(ROOT)
    answer = client.get(path, headers={"Authorization": f"Bearer {key}"} if is_api else {})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    if is_api:
        assert answer.json()["error"]["code"] == "service_unavailable"
        assert answer.headers["x-request-id"].startswith("req_")
    else:
        assert b"Back in a moment" in answer.content


class Relay:
    """A way to the database that can be shut, refusing whoever comes, or lead nowhere, and be opened again. Held, it
    takes everything and brings nothing.
    """

    def __init__(self, port: int) -> None:
        self.behind = port
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._server: socket.socket | None = None
        self._held: list[socket.socket] = []
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._dead: set[socket.socket] = set()  # open, and nothing of them will ever arrive

    def hold(self) -> None:
        self._goes_on.clear()

    def let_go(self, is_dead: bool = False) -> None:
        """``is_dead``: what is open now stays silent, and only what is opened from now on arrives."""
        if is_dead:
            self._dead |= set(self._held)
        self._goes_on.set()

    def open(self, leads_nowhere: bool = False) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._server, leads_nowhere), daemon=True).start()

    def shut(self) -> None:
        assert self._server is not None
        server, self._server = self._server, None
        for held in (server, *self._held):
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()
        self._held.clear()

    def _accept(self, server: socket.socket, leads_nowhere: bool) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                self._held.append(near)
                if leads_nowhere:
                    continue
                far = socket.create_connection(("127.0.0.1", self.behind))
                if self._server is not server:  # shut meanwhile
                    near.close()
                    far.close()
                    return
                self._held.append(far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._goes_on.wait(60)
                if sink not in self._dead:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leads_nowhere", [False, True], ids=["refused", "silent"])
async def test_however_long_the_database_was_away_who_waits_and_who_comes_is_served_when_it_is_back(
    database_urls: dict[str, str], leads_nowhere: bool
) -> None:
    parts = conninfo_to_dict(database_urls["default"])
    relay = Relay(int(parts["port"] or 0))
    conninfo = make_conninfo(**parts | {"port": relay.port, "connect_timeout": 2})
    pool, table = ConnectionPool(conninfo, max_size=NUM_IDLE, **POOL_OPTIONS | {"timeout": 1.0}), KeyTable(conninfo)

    def ask() -> None:
        with pool.connection() as connection:
            connection.execute("SELECT 1")

    pool.open()
    await table.open()
    try:
        relay.open()
        await asyncio.gather(asyncio.to_thread(ask), table.find("none"))
        relay.shut()
        if leads_nowhere:
            relay.open(leads_nowhere=True)
        for _ in range(4):  # by now the pool's own next try would be three seconds off
            with pytest.raises(PoolTimeout):
                await asyncio.to_thread(ask)
        waiting = asyncio.create_task(table.find("none"))
        await asyncio.wait([waiting], timeout=1.5)
        if leads_nowhere:
            relay.shut()
        relay.open()
        began = time.monotonic()
        assert await waiting is None
        with suppress(PoolTimeout):
            await asyncio.to_thread(ask)
        await asyncio.to_thread(ask)
        assert time.monotonic() - began < 2.5
    finally:
        relay.shut()
        pool.close()
        await table.close()
