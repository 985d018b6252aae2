"""What goes wrong on a connection that many share: nobody gets another's answer, or waits for one that cannot come."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop
from redis import exceptions

from tests.wire.scripted_redis import AT_ONCE_S, Command, Session, scripted, until
from wire.redis_bus import Unreachable, connect_async
from wire.redis_bus.line import Line, LineRedis


async def echo(client: LineRedis, number: int) -> int:
    return int(await client.execute_command("ECHO", str(number)))


async def fails(asking: asyncio.Task[int]) -> type[BaseException] | None:
    await asyncio.wait([asking])
    return None if asking.cancelled() else type(asking.exception())


@pytest.mark.parametrize("half", [b"$1", b"$1\r\n", b"$10\r\n123", b"*2\r\n:1\r\n", b"?what is this\r\n", b""])
async def test_an_answer_that_breaks_off_or_is_none_is_asked_for_once_more(half: bytes) -> None:
    async def behave(number: int, session: Session, command: Command) -> None:
        if number == 0 and command[-1] == b"7":
            await session.say(half)
            session.hang_up()
        else:
            await session.echo(command)

    async with scripted(behave) as server, connect_async(server.url) as client:
        assert await asyncio.gather(*(echo(client, number) for number in range(20))) == list(range(20))
        assert server.num_connections == 2


async def test_who_goes_away_with_half_of_its_answer_there_leaves_the_others_theirs() -> None:
    has_gone = asyncio.Event()

    async def behave(number: int, session: Session, command: Command) -> None:
        if command[-1] != b"1":
            await session.echo(command)
            return
        await session.say(b"$1\r")
        await has_gone.wait()
        await session.say(b"\n1\r\n")

    async with scripted(behave) as server, connect_async(server.url) as client:
        await echo(client, 0)
        asking = [asyncio.create_task(echo(client, number)) for number in (1, 2, 3)]
        await until(lambda: len(server.asked) == 2)
        asking[0].cancel()
        await asyncio.wait([asking[0]])
        has_gone.set()
        assert await asyncio.gather(*asking[1:]) == [2, 3]
        assert server.num_connections == 1


async def test_an_answer_that_nobody_asked_for_ends_the_connection_and_not_the_next_command() -> None:
    """Who waits behind it would get the answer of somebody else."""

    async def behave(number: int, session: Session, command: Command) -> None:
        await session.echo(command)
        if number == 0:
            await session.say(b"+OK\r\n")

    async with scripted(behave) as server, connect_async(server.url) as client:
        assert await echo(client, 1) == 1
        await until(lambda: client._line is not None and client._line.is_broken)
        assert await echo(client, 2) == 2
        assert server.num_connections == 2


REFUSALS = {
    "BUSY Redis is busy running a script.": exceptions.ResponseError,
    "READONLY You can't write against a read only replica.": exceptions.ReadOnlyError,
    "OOM command not allowed when used memory > 'maxmemory'.": exceptions.OutOfMemoryError,
    "NOPERM this user has no permissions": exceptions.NoPermissionError,
    "MISCONF Redis is configured to save RDB snapshots": exceptions.ResponseError,
    "LOADING Redis is loading the dataset in memory": Unreachable,
}


@pytest.mark.parametrize("words", REFUSALS, ids=lambda words: words.split()[0])
async def test_a_refusal_is_the_askers_alone_and_is_not_asked_for_again(words: str) -> None:
    """Also of a server that still loads: nothing was carried out, and the other answers are still to come."""

    async def behave(number: int, session: Session, command: Command) -> None:
        if command[-1] == b"1":
            await session.say(b"-%s\r\n" % words.encode())
        else:
            await session.echo(command)

    async with scripted(behave) as server, connect_async(server.url) as client:
        found = await asyncio.gather(*(echo(client, number) for number in range(3)), return_exceptions=True)
        assert found[::2] == [0, 2]
        assert type(found[1]) is REFUSALS[words]
        assert [command[-1] for _, command in server.asked] == [b"0", b"1", b"2"]
        assert server.num_connections == 1


async def test_a_command_that_was_sent_and_meets_a_server_that_loads_may_have_been_carried_out() -> None:
    """The first sending may be what it loads."""

    async def behave(number: int, session: Session, command: Command) -> None:
        if number == 0:
            session.hang_up()
        else:
            await session.say(b"-LOADING Redis is loading the dataset in memory\r\n")

    async with scripted(behave) as server, connect_async(server.url) as client:
        with pytest.raises(exceptions.ConnectionError) as found:
            await echo(client, 1)
    assert not isinstance(found.value, Unreachable)


async def test_many_callers_of_a_broken_connection_wait_for_one_new_one() -> None:
    async def behave(number: int, session: Session, command: Command) -> None:
        if number == 0 and command[-1] == b"999":
            session.hang_up()
        elif number > 0:
            await session.echo(command)

    async with scripted(behave) as server, connect_async(server.url) as client:
        assert await asyncio.gather(*(echo(client, number) for number in range(1_000))) == list(range(1_000))
        assert server.num_connections == 2


async def test_a_server_that_hangs_up_every_time_is_asked_twice_and_no_more() -> None:
    async def behave(number: int, session: Session, command: Command) -> None:
        session.hang_up()

    async with scripted(behave) as server, connect_async(server.url) as client:
        asking = [asyncio.create_task(echo(client, number)) for number in range(100)]
        assert {await fails(one) for one in asking} == {exceptions.ConnectionError}
        assert server.num_connections == 2


async def test_a_command_for_a_line_that_broke_meanwhile_is_told_so_at_once() -> None:
    async def behave(number: int, session: Session, command: Command) -> None:
        await session.echo(command)

    async with scripted(behave) as server, connect_async(server.url) as client:
        line = await client._open()
        await line.close()
        with pytest.raises(exceptions.ConnectionError):
            await line.ask("ECHO", "1")
        assert await echo(client, 1) == 1


@pytest.mark.parametrize("part", ["_send", "_receive", "_watch"])
async def test_a_line_part_of_which_fails_in_an_unforeseen_way_is_replaced_whole(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As the loop's own "the handler is closed", which is no error of the library's."""

    async def behave(number: int, session: Session, command: Command) -> None:
        await session.echo(command)

    async def broken(_: Line) -> None:
        raise RuntimeError("the handler is closed")

    async with scripted(behave) as server, connect_async(server.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Line, part, broken)
            with pytest.raises(exceptions.ConnectionError):
                await echo(client, 1)
        assert await echo(client, 2) == 2


async def silent(number: int, session: Session, command: Command) -> None:
    """Takes commands and answers none."""


async def test_a_silent_connection_is_given_up_also_where_nobody_waits_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wire.redis_bus.line.ANSWER_S", 0.1)

    async def behave(number: int, session: Session, command: Command) -> None:
        if number > 0:
            await session.echo(command)

    async with scripted(behave) as server, connect_async(server.url) as client:
        while server.num_connections < 2:
            with suppress(TimeoutError):
                await asyncio.wait_for(echo(client, 1), 0.01)
        assert await echo(client, 2) == 2


async def test_whoever_waits_when_the_client_is_closed_is_told_so_and_nothing_is_opened_any_more() -> None:
    before: set[Any] = asyncio.all_tasks()
    async with scripted(silent) as server:
        client = connect_async(server.url)
        asking = [asyncio.create_task(echo(client, number)) for number in range(10)]
        await until(lambda: len(server.asked) == 10)
        await client.aclose()
        assert {await fails(one) for one in asking} == {exceptions.ConnectionError}
        with pytest.raises(Unreachable):
            await echo(client, 1)
        assert server.num_connections == 1
        assert client._line is None
        await until(lambda: not asyncio.all_tasks() - before)  # the server's own ends when it sees its client gone


async def test_whoever_waits_for_a_connection_when_the_client_is_closed_is_told_so_and_not_cancelled() -> None:
    arrived = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        await reader.read()
        writer.close()

    async with asyncio.timeout(AT_ONCE_S), await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        client = connect_async(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        asking = [asyncio.create_task(echo(client, number)) for number in range(10)]
        await arrived.wait()
        await client.aclose()
        assert {await fails(one) for one in asking} == {Unreachable}


async def writes_after_a_reset() -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK\r\n+OK\r\n")  # to the library's greeting
        await writer.drain()
        await may_reset.wait()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    may_reset = asyncio.Event()
    async with asyncio.timeout(AT_ONCE_S), await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect_async(f"redis://127.0.0.1:{port}") as client:
            connection: Any = client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
            await connection.connect()
            may_reset.set()
            await until(lambda: connection._reader.exception() is not None)
            with pytest.raises(exceptions.ConnectionError):
                await connection.send_command("PING")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_who_writes_on_a_connection_that_was_reset_is_told_so_by_redis_own_error(run: Callable[[Any], None]) -> None:
    """uvloop says RuntimeError, which nobody tries again and no loop expects."""
    run(writes_after_a_reset())
