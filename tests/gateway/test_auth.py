"""Keys at the door: one header, constant words, a cache that a push empties."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from gateway import auth
from gateway.auth import KEY_TTL_S, UNKNOWN_TTL_S, Caller, Keys, KeyStoreDown, KeyTable, StoredKey, key_of_request
from gateway.errors import Reason, Refusal
from scheduler_engine.policy import PriorityClass
from tenants import api_keys

NEW = api_keys.make("test")
STORED = StoredKey("key-1", "aurora", "chat", NEW.secret_sha256, "interactive", True, None)


class Table:
    """Counts look-ups; answers what it is told."""

    def __init__(self, stored: StoredKey | None = STORED) -> None:
        self.stored = stored
        self.num_lookups = 0
        self.is_down = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def find(self, public_id: str) -> StoredKey | None:
        self.num_lookups += 1
        answer = self.stored if public_id == NEW.public_id else None
        await self.gate.wait()
        if self.is_down:
            raise KeyStoreDown("refused")
        return answer


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def bearer(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", value.encode()) for value in values]


def reason_of(outcome: object) -> Reason:
    assert isinstance(outcome, Refusal)
    return outcome.reason


def test_the_key_comes_from_the_bearer_header() -> None:
    assert key_of_request(bearer("Bearer sk_x"), b"") == "sk_x"


@pytest.mark.parametrize("headers", [[], bearer("sk_x"), bearer("Basic abc"), bearer("Bearer "), bearer("")])
def test_no_bearer_key_is_no_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert reason_of(key_of_request(headers, b"")) is Reason.NO_KEY


def test_two_authorization_headers_are_refused_even_when_equal() -> None:
    assert reason_of(key_of_request(bearer("Bearer sk_x", "Bearer sk_x"), b"")) is Reason.INVALID_KEY


@pytest.mark.parametrize("query", [b"api_key=sk_x", b"a=1&key=sk_x", b"access_token=", b"API_KEY=x"])
def test_a_key_in_the_query_string_is_refused_even_beside_a_good_header(query: bytes) -> None:
    assert reason_of(key_of_request(bearer("Bearer sk_x"), query)) is Reason.KEY_IN_QUERY


async def test_a_good_key_is_its_caller() -> None:
    caller = await Keys(Table().find).authenticate(NEW.text)
    assert caller == Caller("key-1", NEW.public_id, "aurora", "chat", PriorityClass.INTERACTIVE)


async def test_a_typo_is_refused_without_a_look_up() -> None:
    table = Table()
    assert reason_of(await Keys(table.find).authenticate(NEW.text[:-1] + "!")) is Reason.INVALID_KEY
    assert table.num_lookups == 0


async def test_an_unknown_id_and_a_wrong_secret_get_the_same_answer() -> None:
    unknown = await Keys(Table().find).authenticate(api_keys.make("test").text)
    wrong = await Keys(Table(replace(STORED, secret_sha256="0" * 64)).find).authenticate(NEW.text)
    assert isinstance(unknown, Refusal)
    assert unknown == wrong


async def test_a_revoked_key_and_a_switched_off_tenant_open_nothing() -> None:
    table = Table(replace(STORED, is_usable=False))
    assert reason_of(await Keys(table.find).authenticate(NEW.text)) is Reason.INVALID_KEY


async def test_a_key_expires_while_it_is_cached() -> None:
    clock = Clock()
    keys = Keys(Table(replace(STORED, expires_at_s=1_010.0)).find, clock, clock)
    assert isinstance(await keys.authenticate(NEW.text), Caller)
    clock.now_s = 1_010.0
    assert reason_of(await keys.authenticate(NEW.text)) is Reason.INVALID_KEY


async def test_a_known_key_is_looked_up_once_in_its_lifetime() -> None:
    table, clock = Table(), Clock()
    keys = Keys(table.find, clock, clock)
    for _ in range(3):
        await keys.authenticate(NEW.text)
    assert table.num_lookups == 1
    clock.now_s += KEY_TTL_S
    await keys.authenticate(NEW.text)
    assert table.num_lookups == 2


async def test_an_unknown_key_is_remembered_only_shortly() -> None:
    table, clock = Table(None), Clock()
    keys = Keys(table.find, clock, clock)
    await keys.authenticate(NEW.text)
    table.stored = STORED
    clock.now_s += UNKNOWN_TTL_S
    assert isinstance(await keys.authenticate(NEW.text), Caller)


async def test_a_push_drops_the_key_at_once() -> None:
    table = Table()
    keys = Keys(table.find)
    await keys.authenticate(NEW.text)
    table.stored = None
    keys.forget(NEW.public_id)
    assert reason_of(await keys.authenticate(NEW.text)) is Reason.INVALID_KEY


async def test_an_answer_that_a_push_overtook_is_not_kept() -> None:
    table = Table()
    table.gate.clear()
    keys = Keys(table.find)
    asking = asyncio.create_task(keys.authenticate(NEW.text))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    table.stored = None
    keys.forget(NEW.public_id)
    table.gate.set()
    await asking
    assert reason_of(await keys.authenticate(NEW.text)) is Reason.INVALID_KEY


async def test_many_who_ask_at_once_share_one_look_up() -> None:
    table = Table()
    keys = Keys(table.find)
    callers = await asyncio.gather(*(keys.authenticate(NEW.text) for _ in range(20)))
    assert table.num_lookups == 1
    assert len(set(callers)) == 1


async def test_while_the_database_is_down_a_new_key_is_503_and_a_known_one_still_works() -> None:
    table = Table()
    keys = Keys(table.find)
    await keys.authenticate(NEW.text)
    table.is_down = True
    assert isinstance(await keys.authenticate(NEW.text), Caller)
    keys.forget(NEW.public_id)
    assert reason_of(await keys.authenticate(NEW.text)) is Reason.UNAVAILABLE


class Told:
    """A key that was looked up, and is due for another look at a database that does not answer."""

    def __init__(self) -> None:
        self.table, self.clock, self.is_told = Table(), Clock(), True
        self.keys = Keys(self.table.find, self.clock, self.clock, lambda: self.is_told)

    async def begin(self, *, is_silent: bool = False) -> None:
        await self.keys.authenticate(NEW.text)
        self.clock.now_s += KEY_TTL_S
        if is_silent:
            self.table.gate.clear()
        else:
            self.table.is_down = True


@pytest.mark.parametrize("is_silent", [False, True], ids=["refuses", "silent"])
async def test_a_known_key_opens_while_the_database_is_away_and_a_push_would_have_told_of_its_end(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "PATIENCE_S", 0.01)
    told = Told()
    await told.begin(is_silent=is_silent)
    callers = await asyncio.gather(*(told.keys.authenticate(NEW.text) for _ in range(3)))
    assert {type(one) for one in callers} == {Caller}
    asked = told.table.num_lookups
    assert isinstance(await told.keys.authenticate(NEW.text), Caller)
    assert told.table.num_lookups == asked  # and not asked again for each that comes
    told.table.gate.set()


async def test_without_pushes_nobody_opens_beyond_the_lifetime_of_what_is_known() -> None:
    told = Told()
    await told.begin()
    told.is_told = False
    assert reason_of(await told.keys.authenticate(NEW.text)) is Reason.UNAVAILABLE


async def test_a_key_that_a_push_ended_opens_nothing_while_the_database_is_away() -> None:
    told = Told()
    await told.begin()
    told.keys.forget(NEW.public_id)
    assert reason_of(await told.keys.authenticate(NEW.text)) is Reason.UNAVAILABLE


async def test_a_push_during_the_wait_for_the_database_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "PATIENCE_S", 0.05)
    told = Told()
    await told.begin(is_silent=True)
    asking = asyncio.create_task(told.keys.authenticate(NEW.text))
    await asyncio.sleep(0)
    told.keys.forget(NEW.public_id)
    told.table.stored = replace(STORED, is_usable=False)
    told.table.gate.set()
    assert reason_of(await asking) is Reason.INVALID_KEY


async def test_the_database_that_is_back_is_asked_again() -> None:
    told = Told()
    await told.begin()
    assert isinstance(await told.keys.authenticate(NEW.text), Caller)
    told.table.is_down, told.table.stored = False, replace(STORED, is_usable=False)
    told.clock.now_s += auth.AGAIN_S
    assert reason_of(await told.keys.authenticate(NEW.text)) is Reason.INVALID_KEY


class Rotated:
    """A key whose secret was rotated at 1,000 s with a grace of 60 s, under one public id."""

    def __init__(self) -> None:
        self.wall_s = 1_000.0
        self.new = api_keys.make("test", NEW.public_id)
        stored = replace(
            STORED, secret_sha256=self.new.secret_sha256, previous_sha256=NEW.secret_sha256, previous_until_s=1_060.0
        )
        self.keys = Keys(Table(stored).find, wall_clock_s=lambda: self.wall_s)


async def test_in_the_grace_both_secrets_open_and_the_old_one_is_told_its_sunset() -> None:  # P43
    rotated = Rotated()
    rotated.wall_s = 1_059.9
    old, new = [await rotated.keys.authenticate(text) for text in (NEW.text, rotated.new.text)]
    assert isinstance(old, Caller)
    assert isinstance(new, Caller)
    assert (old.sunset_at_s, new.sunset_at_s) == (1_060.0, None)


async def test_after_the_grace_only_the_new_secret_opens() -> None:  # P43
    rotated = Rotated()
    rotated.wall_s = 1_060.0
    assert reason_of(await rotated.keys.authenticate(NEW.text)) is Reason.INVALID_KEY
    assert isinstance(await rotated.keys.authenticate(rotated.new.text), Caller)


async def test_a_key_without_a_previous_secret_is_not_opened_by_zeros() -> None:
    zeros = replace(STORED, previous_sha256="", previous_until_s=9e9)
    other = api_keys.make("test", NEW.public_id)
    assert reason_of(await Keys(Table(zeros).find).authenticate(other.text)) is Reason.INVALID_KEY


async def test_keys_that_opened_are_told_once_and_refused_ones_never() -> None:
    keys = Keys(Table().find)
    for text in (NEW.text, NEW.text, api_keys.make("test").text):
        await keys.authenticate(text)
    assert (keys.take_used(), keys.take_used()) == (["key-1"], [])


async def test_who_still_sends_the_old_secret_is_told_when_it_ends(world: Any) -> None:  # P43
    old = world.shelf.issue("aurora")
    public_id = api_keys.parse(old).public_id
    stored, new = world.shelf.stored[public_id], api_keys.make("test", public_id)
    world.shelf.stored[public_id] = replace(
        stored,
        secret_sha256=new.secret_sha256,
        previous_sha256=stored.secret_sha256,
        previous_until_s=4_102_444_800.0,
    )
    world.keys.update(old=old, new=new.text)
    headers = {which: (await world.client(which).models.with_raw_response.list()).headers for which in ("old", "new")}
    assert headers["old"]["sunset"] == "Fri, 01 Jan 2100 00:00:00 GMT"
    assert "sunset" not in headers["new"]


async def test_a_push_that_came_while_the_last_one_was_seen_to_is_not_lost() -> None:
    keys = Keys(Table().find)
    seen = keys.num_changes
    keys.forget(NEW.public_id)  # nobody waits just now
    async with asyncio.timeout(1.0):
        assert await keys.until_changed(seen, 60.0) == seen + 1


async def test_without_a_push_the_wait_ends_after_its_limit() -> None:
    keys = Keys(Table().find)
    assert await keys.until_changed(keys.num_changes, 0.0) == keys.num_changes


async def test_a_database_that_takes_connections_and_answers_nobody_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "ANSWER_S", 0.1)
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    table = KeyTable(f"host=127.0.0.1 port={server.sockets[0].getsockname()[1]} dbname=rubato user=app_ops")
    async with server:
        await table.open()
        for ask in (lambda: table.find(NEW.public_id), lambda: table.note_used(["key-1"])):
            async with asyncio.timeout(2.0):
                with pytest.raises(KeyStoreDown):
                    await ask()
        await table.close()
        for writer in writers:
            writer.close()


async def test_a_driver_that_waits_on_although_it_is_cancelled_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As psycopg does for a server that has stopped in the middle of a statement."""
    monkeypatch.setattr(auth, "ANSWER_S", 0.01)
    goes_on = asyncio.Event()

    async def statement() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await goes_on.wait()

    async with asyncio.timeout(1.0):
        with pytest.raises(KeyStoreDown):
            await auth._answer(statement())
    goes_on.set()


@pytest.mark.parametrize("kind", [psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.AdminShutdown])
async def test_whatever_the_driver_says_keys_cannot_be_checked_now(kind: type[psycopg.Error]) -> None:
    async def statement() -> None:
        raise kind("the connection is closed")

    with pytest.raises(KeyStoreDown):
        await auth._answer(statement())
