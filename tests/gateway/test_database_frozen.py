"""A database that takes what it is sent and answers nothing: nobody waits for it long, and nobody is told a guess."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.db import OperationalError, connections
from django.test import Client
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from gateway import postgresql
from gateway.auth import KeyStoreDown, KeyTable
from gateway.batches.archive import Archive
from gateway.batches.storage import Storage
from gateway.database_threads import DatabaseThreads, asked
from gateway.embedded import EmbeddedPostgres
from gateway.errors import InvalidRequest, Reason
from gateway.postgresql.base import DatabaseWrapper
from tenants.models import ApiKey, Tenant
from tenants.roles import Role
from tests.gateway.management_world import ROOT, House, of_owner_and_operator, open_houses
from tests.gateway.test_database_away import NUM_IDLE, POOLED, Relay, fill_pools, get

pytestmark = pytest.mark.django_db(transaction=True)
WAIT_S, SILENCE_S, TRIAL_S = 1.0, 1.5, 0.3  # for a connection, at work, of a trial
TOLD_S = WAIT_S + TRIAL_S + SILENCE_S + 1.5  # by then everybody has an answer; the last part is this machine's
BACK_S = 3.0


class Frozen:
    """The server of the tests. Always: where it stands still, all of its processes do."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._cluster = Path(server.command()[-1])
        self._stopped: list[psutil.Process] = []

    def freeze(self) -> None:
        postmaster = psutil.Process(int((self._cluster / "postmaster.pid").read_text().splitlines()[0]))
        postmaster.suspend()  # first: it makes no others then
        self._stopped = [postmaster, *postmaster.children(recursive=True)]
        for process in self._stopped[1:]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        while self._stopped:
            with suppress(psutil.NoSuchProcess):
                self._stopped.pop().resume()


@pytest.fixture
def house(settings: Any) -> House:
    return open_houses(settings)["aurora"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bounds of a gateway, shorter."""
    monkeypatch.setitem(postgresql.POOL_OPTIONS, "timeout", WAIT_S)
    monkeypatch.setattr(postgresql, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(postgresql, "TRIAL_S", TRIAL_S)
    monkeypatch.setattr(postgresql.Heard, "silence_s", TRIAL_S)
    _without_pools()
    yield
    _without_pools()


def _without_pools() -> None:
    connections.close_all()
    for alias in POOLED:
        connections[alias].close_pool()


@pytest.fixture
def server(house: House, impatient: None, postgres: EmbeddedPostgres) -> Iterator[Frozen]:
    """Thawed at the end. Pools are full of idle connections before, as in a gateway that has had some work."""
    fill_pools()
    frozen = Frozen(postgres)
    yield frozen
    frozen.thaw()


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_met


@pytest.mark.parametrize("path", [f"{ROOT}/projects", f"{ROOT}/usage/export", "/console/aurora/keys"])
def test_whoever_comes_while_it_is_frozen_is_told_soon_and_served_soon_after(
    house: House, server: Frozen, path: str
) -> None:
    key = house.management_key(Role.ADMIN)
    browser = of_owner_and_operator(house)
    browser.raise_request_exception = False

    def look() -> tuple[int, float]:
        began = time.monotonic()
        if path.startswith(ROOT):
            status = get(path, key).status_code
        else:
            status = browser.get(path).status_code
            connections.close_all()
        return status, time.monotonic() - began

    assert look()[0] == 200
    fill_pools()
    server.freeze()
    with ThreadPoolExecutor(2 * NUM_IDLE) as threads:
        found = [one.result() for one in [threads.submit(look) for _ in range(2 * NUM_IDLE)]]
    assert {status for status, _ in found} == {503}
    assert max(seconds for _, seconds in found) < TOLD_S
    server.thaw()
    assert within(BACK_S, lambda: look()[0] == 200)


def test_what_is_under_way_when_it_freezes_ends_after_the_bound_and_not_before(house: House, server: Frozen) -> None:
    has_begun = threading.Event()

    def ask(sleep_s: float) -> float:
        began = time.monotonic()
        try:
            with connections["default"].cursor() as cursor:
                has_begun.set()
                cursor.execute("SELECT pg_sleep(%s)", [sleep_s])
        finally:
            connections.close_all()
        return time.monotonic() - began

    assert ask(SILENCE_S - 0.5) >= SILENCE_S - 0.5
    has_begun.clear()
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, 60)
        assert has_begun.wait(5)
        server.freeze()
        with pytest.raises(OperationalError, match="said nothing for"):
            asking.result()
    assert SILENCE_S <= time.monotonic() - began < TOLD_S


@pytest.mark.parametrize("is_dead", [False, True], ids=["goes on", "dead"])
async def test_pools_go_on_when_a_server_that_was_silent_is_back_or_another_is_in_its_place(
    impatient: None, database_urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """Also where the lines to the first one stay open, and are acknowledged for ever."""
    monkeypatch.setattr("gateway.auth.ANSWER_S", WAIT_S)
    monkeypatch.setattr(postgresql.HeardAsync, "silence_s", TRIAL_S)
    parts = conninfo_to_dict(database_urls["default"])
    relay = Relay(int(parts["port"] or 0))
    conninfo = make_conninfo(**parts | {"port": relay.port, "connect_timeout": 2})
    pool, table = ConnectionPool(conninfo, max_size=NUM_IDLE, **postgresql.POOL_OPTIONS), KeyTable(conninfo)
    met = threading.Barrier(NUM_IDLE)

    def ask(is_together: bool = False) -> None:
        with pool.connection() as connection:
            if is_together:
                met.wait(10)
            connection.execute("SELECT 1")

    relay.open()
    pool.open()
    await table.open()
    try:
        together = [asyncio.to_thread(ask, True) for _ in range(NUM_IDLE)]
        await asyncio.gather(*together, *(table.find("none") for _ in range(NUM_IDLE)))
        relay.hold()
        for _ in range(2):
            with pytest.raises(psycopg.OperationalError):
                await asyncio.to_thread(ask)
            with pytest.raises(KeyStoreDown):
                await table.find("none")
        relay.let_go(is_dead)
        began = time.monotonic()
        while True:
            with suppress(psycopg.OperationalError, KeyStoreDown):
                await asyncio.to_thread(ask)
                assert await table.find("none") is None
                break
            assert time.monotonic() - began < BACK_S
    finally:
        pool.close()
        await table.close()
        relay.shut()


@pytest.mark.parametrize("kind", [ConnectionPool, AsyncConnectionPool])
def test_every_pool_is_of_connections_that_stop_listening_to_silence(kind: type[Any]) -> None:
    options = postgresql.POOL_OPTIONS if kind is ConnectionPool else postgresql.ASYNC_POOL_OPTIONS
    assert options["connection_class"] in (postgresql.Heard, postgresql.HeardAsync)
    assert options["connection_class"].silence_s <= postgresql.ANSWER_S


def test_no_more_than_so_many_threads_wait_whoever_else_comes_is_told_at_once(house: House, server: Frozen) -> None:
    key = house.management_key(Role.ADMIN)
    fill_pools()
    pool = connections["default"].pool
    assert pool.max_waiting == postgresql.MOST_WAITING
    pool.max_waiting = 2
    num_more = 6
    server.freeze()

    def timed() -> tuple[int, float]:
        began = time.monotonic()
        return get(f"{ROOT}/projects", key).status_code, time.monotonic() - began

    num_asking = NUM_IDLE + pool.max_waiting + num_more
    with ThreadPoolExecutor(num_asking) as threads:
        found = [one.result() for one in [threads.submit(timed) for _ in range(num_asking)]]
    assert {status for status, _ in found} == {503}
    assert sum(seconds < WAIT_S - TRIAL_S for _, seconds in found) >= num_more


def freeze_at_commit(server: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the next key is sent, and its answer does not come."""
    save, commit, is_saved = ApiKey.save, DatabaseWrapper._commit, threading.Event()

    def noted_save(self: ApiKey, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        is_saved.set()

    def frozen_commit(self: DatabaseWrapper) -> None:
        if is_saved.is_set():
            server.freeze()
        commit(self)

    monkeypatch.setattr(ApiKey, "save", noted_save)
    monkeypatch.setattr(DatabaseWrapper, "_commit", frozen_commit)


def test_a_key_whose_secret_was_lost_is_not_asked_for_again_by_a_client_that_repeats_refusals(
    house: House, server: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = house.management_key(Role.OWNER)
    client = Client(raise_request_exception=False)
    path = f"{ROOT}/projects/{house.project.pk}/api_keys"
    with monkeypatch.context() as patch:
        freeze_at_commit(server, patch)
        answer = client.post(path, {"name": "lost"}, "application/json", headers={"Authorization": f"Bearer {key}"})
        connections.close_all()
    server.thaw()
    assert within(BACK_S, lambda: num_keys() == 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "outcome_unknown")
    assert "may have been done" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def num_keys() -> int:
    with suppress(OperationalError):
        return ApiKey.objects.filter(name="lost").count()
    return -1


def test_a_page_that_lost_the_secret_of_a_key_says_so_and_the_form_once_more_makes_no_other(
    house: House, server: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = of_owner_and_operator(house)
    browser.raise_request_exception = False
    form = {"name": "lost", "project": house.project.pk, "made_id": uuid.uuid4()}
    with monkeypatch.context() as patch:
        freeze_at_commit(server, patch)
        answer = browser.post("/console/aurora/keys", form)
        connections.close_all()
    server.thaw()
    assert within(BACK_S, lambda: num_keys() == 1)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert b"may have been done" in answer.content
    assert "retry-after" not in answer.headers
    browser.post("/console/aurora/keys", form)
    assert num_keys() == 1


@pytest.mark.parametrize("method", ["post", "put", "patch", "delete"])
@pytest.mark.parametrize("path", [f"{ROOT}/projects", "/console/aurora/keys"])
def test_whatever_would_change_something_is_never_said_to_have_failed(
    house: House, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    client, key = of_owner_and_operator(house), house.management_key(Role.OWNER)
    client.raise_request_exception = False
    connections.close_all()

    def refuse(*_: object) -> None:
        raise OperationalError("the server closed the connection")

    monkeypatch.setattr(DatabaseWrapper, "connect", refuse)
    answer = getattr(client, method)(path, headers={"Authorization": f"Bearer {key}"} if path.startswith(ROOT) else {})
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "false"
    assert b"may have been done" in answer.content


@pytest.mark.parametrize(
    ("may_repeat", "reason"), [(True, Reason.UNAVAILABLE), (False, Reason.PERHAPS_DONE)], ids=["again", "another"]
)
async def test_work_on_files_and_batches_that_would_make_another_thing_does_not_invite_to_repeat_it(
    tmp_path: Path, may_repeat: bool, reason: Reason
) -> None:
    archive = Archive(storage=Storage(tmp_path), file_limit_bytes=1, tenant_limit_bytes=1)

    def lose() -> None:
        raise OperationalError("gone")

    try:
        with pytest.raises(InvalidRequest) as refused:
            await archive.ask(lose, may_repeat=may_repeat)
        assert refused.value.refusal.reason is reason
    finally:
        archive.threads.close()


async def test_who_waits_for_a_thread_longer_than_may_be_is_told_and_what_had_no_turn_is_never_done() -> None:
    threads, may_end, done = DatabaseThreads(0.2), threading.Event(), list[str]()
    try:
        held = [asyncio.create_task(threads.run(lambda: may_end.wait(10))) for _ in range(NUM_IDLE)]
        await asyncio.sleep(0)
        for waiting in (*held, asyncio.create_task(threads.run(lambda: done.append("late")))):
            with pytest.raises(OperationalError, match="no answer within"):
                await waiting
        may_end.set()
        assert await threads.run(lambda: "next") == "next"
        assert done == []
    finally:
        may_end.set()
        threads.close()


async def test_the_question_of_one_socket_does_not_wait_behind_that_of_another(house: House) -> None:
    may_end = threading.Event()
    held = asyncio.create_task(asked(lambda: may_end.wait(10)))
    try:
        async with asyncio.timeout(5):
            assert await asked(Tenant.objects.count) == 2
    finally:
        may_end.set()
        await held
