"""Redis did it and nobody heard: what was let in so is released again while its gateway lives, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from redis import exceptions

from gateway.owed import LATE_S, Owed
from gateway.ownership import Owner
from wire.bus import BusError
from wire.messages import Released
from wire.redis_bus import Unreachable, connect_async

HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def refused(world: Any) -> None:
    with pytest.raises(openai.InternalServerError):
        await world.client().chat.completions.create(model="simulated", messages=HI)


def released(world: Any) -> list[str]:
    return [message.response_id for message in world.usage_messages() if isinstance(message, Released)]


def nothing_is_held(world: Any) -> bool:
    return world.slots_in_use() == 0 and world.money("aurora", "default")["open"] == 0


@pytest.mark.parametrize("times", [1, 2], ids=["not sent again", "sent again"])
async def test_a_response_let_in_by_a_call_whose_answer_was_lost_is_released(
    world: Any, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """P31. Sent once more the call meets its own record, and is refused as a duplicate."""
    script = world.runtime.admission._script

    async def unheard(**call: Any) -> Any:
        for _ in range(times):
            answer = await script(**call)
        if times == 1:
            raise exceptions.ConnectionError("the connection broke")
        return answer

    monkeypatch.setattr(world.runtime.admission, "_script", unheard)
    await refused(world)
    await world.until(lambda: nothing_is_held(world))
    assert len(released(world)) == 1
    assert not world.worker.submits


async def test_a_release_that_redis_did_not_hear_is_sent_until_it_does(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, fails = world.runtime.bus.append_usage, [True, True]

    async def down(*_: object) -> None:
        raise BusError("down")

    async def append_usage(message: Any) -> None:
        if fails:
            fails.pop()
            raise BusError("down")
        await append(message)

    monkeypatch.setattr(world.runtime.bus, "send", down)
    monkeypatch.setattr(world.runtime.bus, "append_usage", append_usage)
    await refused(world)
    await world.until(lambda: nothing_is_held(world), 15.0)
    assert len(released(world)) == 1


async def test_a_call_that_was_surely_not_sent_owes_nothing(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long outage leaves no list of all that was refused in it."""

    async def unreachable(**_: Any) -> Any:
        raise Unreachable("connection refused")

    monkeypatch.setattr(world.runtime.admission, "_script", unreachable)
    await refused(world)
    assert len(world.runtime.door.owed) == 0


class Deaf:
    """A way to Redis that carries a client's commands there, and at times no answers back."""

    def __init__(self, url: str) -> None:
        self._where = urlsplit(url)
        self.hears_nothing = False
        self.num_unheard = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._where.hostname, self._where.port)
        try:
            while command := await reader.read(65_536):
                back.write(command)
                answer = await there.read(65_536)
                if self.hears_nothing:
                    self.num_unheard += 1
                    return
                writer.write(answer)
        finally:
            writer.close()
            back.close()


@pytest.mark.parametrize("unheard", [("admission",), ("Submit",), ("admission", "Submit")], ids=" and ".join)
async def test_whatever_redis_did_and_nobody_heard_is_undone_again(world: Any, unheard: tuple[str, ...]) -> None:
    """On the wire itself: the command arrives, its connection breaks, and so does that of its second sending."""
    runtime, deaf = world.runtime, Deaf(world.url)
    server = await asyncio.start_server(deaf.serve, "127.0.0.1", 0)
    user = urlsplit(world.url).netloc.rsplit("@", 1)[0]
    client = connect_async(f"redis://{user}@127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    async with server, client:
        for name, script in (("admission", runtime.admission._script), ("Submit", runtime.bus._append)):
            if name in unheard:
                script.registered_client = client
                await client.script_load(script.script)
        deaf.hears_nothing = True
        await refused(world)
        deaf.hears_nothing = False
        assert deaf.num_unheard > 0
        await world.until(lambda: nothing_is_held(world))
        assert len(released(world)) == 1
        await world.client().chat.completions.create(model="simulated", messages=HI)
    await world.until(lambda: nothing_is_held(world))


class Books:
    """A Bus and its records, as a test puts them."""

    gateway_id = "me"

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self.is_served = False
        self.released: list[str] = []
        self.now_s = 0.0
        self.while_asked: Callable[[], None] = lambda: None
        bus: Any = self
        self.owed = Owed(bus, bus, lambda _: self.is_served, lambda: self.now_s)

    async def owners(self, response_ids: Sequence[str]) -> list[Owner | None]:
        self.while_asked()
        return [self.owner for _ in response_ids]

    async def append_usage(self, message: Released) -> None:
        self.released.append(message.response_id)

    async def look(self, at_s: float) -> None:
        self.now_s = at_s
        await self.owed.pay()


def owner(state: str = "open", gateway_id: str = "me") -> Owner:
    return Owner(state, gateway_id, "worker", 1, 1, "", "", "aurora", "default")


async def test_a_call_that_arrives_late_is_found_at_a_second_look() -> None:
    books = Books()
    books.owed.note("r1", "aurora", "not_dispatched")
    await books.look(0.0)
    books.owner = owner()
    await books.look(LATE_S - 0.1)
    assert books.released == []
    await books.look(LATE_S)
    assert books.released == ["r1"]
    assert len(books.owed) == 0


@pytest.mark.parametrize(
    ("found", "is_served"),
    [(None, False), (owner("done"), False), (owner(gateway_id="other"), False), (owner(), True)],
    ids=["there is none", "it has ended", "it is another's", "it is served here"],
)
async def test_nothing_is_released_that_is_not_ours_and_lost(found: Owner | None, is_served: bool) -> None:
    books = Books()
    books.owner, books.is_served = found, is_served
    books.owed.note("r1", "aurora", "not_dispatched")
    await books.look(0.0)
    await books.look(LATE_S)
    assert books.released == []
    assert len(books.owed) == 0


async def test_what_is_asked_for_once_more_is_not_released_under_its_feet() -> None:
    books = Books()
    books.owner = owner()
    books.owed.note("r1", "aurora", "not_dispatched")
    books.owed.forget("r1")
    await books.look(0.0)
    assert books.released == []


async def test_what_is_asked_for_once_more_while_it_is_looked_for_is_left_alone_and_the_others_are_not() -> None:
    books = Books()
    books.owner = owner()
    for name in ("r1", "r2"):
        books.owed.note(name, "aurora", "not_dispatched")
    books.while_asked = lambda: books.owed.forget("r1")
    await books.look(0.0)
    assert books.released == ["r2"]
    assert len(books.owed) == 0
