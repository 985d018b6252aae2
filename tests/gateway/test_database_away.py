"""A database that restarts: what was connected before is noticed before anybody is answered, and an outage is a 503."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, OperationalError, connections
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test import Client
from psycopg_pool import PoolTimeout

from gateway.auth import KeyTable
from gateway.database_threads import DatabaseThreads
from tenants.models import Tenant
from tenants.roles import Role
from tests.gateway.management_world import ROOT, House, open_houses

pytestmark = pytest.mark.django_db(transaction=True)
NUM_IDLE = 3
POOLED = ("default", "tenant")


@pytest.fixture
def house(settings: Any) -> House:
    return open_houses(settings)["aurora"]


@pytest.fixture
def cut(database_urls: dict[str, str]) -> Callable[[], None]:
    """Ends every connection that any role has, as a restart does. Pools hold several idle ones before."""

    def cut_all() -> None:
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


@pytest.mark.parametrize("error", [OperationalError, InterfaceError, PoolTimeout])
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
