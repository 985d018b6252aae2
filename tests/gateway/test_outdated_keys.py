"""A key that changed while no push could tell a gateway of it: nobody is refused for good by what it knew before."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.auth import KEY_TTL_S, UNKNOWN_TTL_S, Caller, Keys, StoredKey
from gateway.errors import Reason
from tenants import api_keys
from tests.gateway.test_auth import NEW, STORED, Clock, Table, reason_of


class Outdated:
    """A key that a gateway has let in, and that has a new secret since, without a grace, or another state."""

    def __init__(self, *, is_told: bool = False) -> None:
        self.clock, self.is_told, self.new = Clock(), is_told, api_keys.make("test", NEW.public_id)
        self.table = Table()
        self.keys = Keys(self.table.find, self.clock, self.clock, lambda: self.is_told)

    async def rotate(self) -> None:
        assert isinstance(await self.keys.authenticate(NEW.text), Caller)
        self.table.stored = replace(
            STORED,
            secret_sha256=self.new.secret_sha256,
            previous_sha256=NEW.secret_sha256,
            previous_until_s=self.clock.now_s,
        )
        self.table.num_lookups = 0


async def test_a_new_secret_opens_at_once_although_nobody_could_tell_of_it() -> None:
    outdated = Outdated()
    await outdated.rotate()
    assert isinstance(await outdated.keys.authenticate(outdated.new.text), Caller)
    assert reason_of(await outdated.keys.authenticate(NEW.text)) is Reason.INVALID_KEY


@pytest.mark.parametrize(
    "before",
    [
        replace(STORED, is_usable=False),
        replace(STORED, expires_at_s=1_000.0),
        replace(STORED, secret_sha256="0" * 64, previous_sha256=NEW.secret_sha256, previous_until_s=1_000.0),
    ],
    ids=["switched off", "expired", "rotated away"],
)
async def test_nobody_is_refused_by_a_row_that_has_changed_while_nobody_could_tell(before: StoredKey) -> None:
    clock, table = Clock(), Table(before)
    keys = Keys(table.find, clock, clock)
    assert reason_of(await keys.authenticate(NEW.text)) is Reason.INVALID_KEY
    table.stored = STORED
    clock.now_s += UNKNOWN_TTL_S
    assert isinstance(await keys.authenticate(NEW.text), Caller)


async def test_a_wrong_secret_costs_no_query_while_a_push_would_have_told_of_a_new_one() -> None:
    outdated = Outdated(is_told=True)
    await outdated.rotate()
    outdated.table.stored = STORED
    assert reason_of(await outdated.keys.authenticate(outdated.new.text)) is Reason.INVALID_KEY
    assert outdated.table.num_lookups == 0


async def test_a_flood_of_wrong_secrets_of_one_key_is_one_look_up_a_second() -> None:
    outdated = Outdated()
    await outdated.rotate()
    wrong = [api_keys.make("test", NEW.public_id).text for _ in range(20)]
    for num_seconds in range(1, 4):
        for _ in range(2):
            refused = await asyncio.gather(*(outdated.keys.authenticate(text) for text in wrong))
            assert {reason_of(one) for one in refused} == {Reason.INVALID_KEY}
        assert isinstance(await outdated.keys.authenticate(outdated.new.text), Caller)
        assert outdated.table.num_lookups == num_seconds
        outdated.clock.now_s += UNKNOWN_TTL_S


async def test_where_neither_a_push_nor_the_database_tells_a_wrong_secret_may_come_again() -> None:
    outdated = Outdated()
    await outdated.rotate()
    outdated.table.is_down = True
    assert reason_of(await outdated.keys.authenticate(outdated.new.text)) is Reason.UNAVAILABLE
    outdated.table.is_down = False
    assert isinstance(await outdated.keys.authenticate(outdated.new.text), Caller)


@pytest.mark.parametrize("is_down", [False, True], ids=["database", "no database"])
async def test_an_ended_secret_opens_no_longer_for_the_others_that_are_tried(is_down: bool) -> None:
    outdated = Outdated()
    await outdated.rotate()
    ends_at_s = outdated.clock.now_s + KEY_TTL_S
    outdated.table.is_down = is_down
    while outdated.clock.now_s < ends_at_s:
        await outdated.keys.authenticate(api_keys.make("test", NEW.public_id).text)
        outdated.clock.now_s += 1.0
    ended = Reason.UNAVAILABLE if is_down else Reason.INVALID_KEY
    assert reason_of(await outdated.keys.authenticate(NEW.text)) is ended
