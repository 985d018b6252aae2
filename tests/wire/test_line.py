"""Many callers on one connection of a real Valkey: each gets its own answer, whatever happens to the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions

from gateway.embedded import EmbeddedValkey, running
from tests.wire.scripted_redis import until
from wire.redis_bus import Unreachable, connect, connect_async
from wire.redis_bus.line import LineRedis


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[LineRedis]:
    async with connect_async(valkey_url) as client:
        yield client


@pytest.fixture
def cut(valkey_url: str) -> Callable[[], None]:
    """As a router that forgets its connections."""

    def cut_all() -> None:
        with connect(valkey_url) as other:
            other.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    return cut_all


async def echo(client: LineRedis, number: int) -> int:
    return int(await client.execute_command("ECHO", str(number)))


async def test_each_of_many_callers_gets_its_own_answer_over_one_connection(client: LineRedis) -> None:
    assert await asyncio.gather(*(echo(client, number) for number in range(1_000))) == list(range(1_000))
    own = await client.execute_command("CLIENT", "ID")
    assert set(await asyncio.gather(*(client.execute_command("CLIENT", "ID") for _ in range(50)))) == {own}


async def test_an_answer_that_is_an_error_is_the_askers_alone(client: LineRedis) -> None:
    wrong = client.execute_command("NO-SUCH-COMMAND")
    found = await asyncio.gather(echo(client, 1), wrong, echo(client, 2), return_exceptions=True)
    assert found[::2] == [1, 2]
    assert isinstance(found[1], exceptions.ResponseError)


async def test_a_caller_that_goes_away_takes_nobody_elses_answer(client: LineRedis) -> None:
    await echo(client, 0)
    tasks = [asyncio.create_task(echo(client, number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    stayed = [number for number in range(100) if number % 3]
    assert await asyncio.gather(*(tasks[number] for number in stayed)) == stayed


async def test_what_was_under_way_on_a_cut_connection_is_sent_once_more(
    client: LineRedis, cut: Callable[[], None]
) -> None:
    await echo(client, 0)
    for _ in range(3):
        asking = [asyncio.create_task(echo(client, number)) for number in range(100)]
        await asyncio.sleep(0)
        cut()
        assert await asyncio.gather(*asking) == list(range(100))


async def test_a_silent_connection_is_given_up_and_the_next_command_has_a_new_one(
    client: LineRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wire.redis_bus.line.ANSWER_S", 0.5)
    with pytest.raises(exceptions.TimeoutError):
        await client.execute_command("BLPOP", "a-list-that-nobody-fills", 30)
    monkeypatch.setattr("wire.redis_bus.line.ANSWER_S", 5.0)
    assert await echo(client, 7) == 7


async def test_a_server_that_takes_connections_and_says_nothing_is_told_of_to_all_callers_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not try one after another."""
    monkeypatch.setattr("wire.redis_bus.line.ANSWER_S", 0.2)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        async with asyncio.timeout(5), connect_async(f"redis://127.0.0.1:{port}") as client:
            found = await asyncio.gather(*(echo(client, number) for number in range(100)), return_exceptions=True)
    assert {type(one) for one in found} == {Unreachable}


async def test_a_server_that_pauses_is_waited_for_and_every_answer_is_its_askers(
    client: LineRedis, valkey_url: str
) -> None:
    await echo(client, 0)
    with connect(valkey_url) as other:
        other.client_pause(300)
        asking = [asyncio.create_task(echo(client, number)) for number in range(100)]
        await asyncio.sleep(0)
        for task in asking[::3]:
            task.cancel()
        stayed = [number for number in range(100) if number % 3]
        assert await asyncio.gather(*(asking[number] for number in stayed)) == stayed


async def test_an_answer_of_many_megabytes_comes_whole_between_the_small_ones(client: LineRedis) -> None:
    large = b"0123456789abcdef" * 2**20
    await client.set("test-line-large", large)
    found = await asyncio.gather(echo(client, 1), client.get("test-line-large"), echo(client, 2))
    await client.delete("test-line-large")
    assert found[::2] == [1, 2]
    assert found[1] == large


async def test_scripts_that_the_server_has_forgotten_are_told_to_it_again_by_whoever_finds_out(
    client: LineRedis,
) -> None:
    script = client.register_script("return tonumber(ARGV[1]) + 1")
    for _ in range(3):
        assert await asyncio.gather(*(script(args=[n]) for n in range(100))) == list(range(1, 101))
        await client.script_flush()


async def test_a_server_that_dies_under_load_costs_errors_and_no_wrong_answer(tmp_path: Path) -> None:
    """kill -9, and another on the same port; whoever is told nothing went wrong has its own answer."""
    server = EmbeddedValkey(tmp_path)
    over = asyncio.Event()
    found: Counter[str] = Counter()

    async def ask(client: LineRedis, number: int) -> None:
        while not over.is_set():
            try:
                found["right" if await echo(client, number) == number else "wrong"] += 1
            except exceptions.RedisError:
                found["failed"] += 1
            number += 100
            await asyncio.sleep(0)

    async with AsyncExitStack() as stack:
        with running(server, tmp_path / "log") as process:
            client = await stack.enter_async_context(connect_async(server.url))
            asking = [asyncio.create_task(ask(client, number)) for number in range(100)]
            await until(lambda: found["right"] > 1_000)
            process.kill()
            await until(lambda: found["failed"] > 100)
        with running(server, tmp_path / "log"):
            right = found["right"]
            await until(lambda: found["right"] > right + 1_000)
            over.set()
            await asyncio.gather(*asking)
    assert found["wrong"] == 0


async def test_answers_are_understood_as_the_library_understands_them(client: LineRedis) -> None:
    await client.hset("test-line", mapping={"a": 1})
    assert await client.hgetall("test-line") == {b"a": b"1"}
    assert await client.register_script("return ARGV[1]")(args=["x"]) == b"x"
    await client.delete("test-line")


async def test_a_closed_client_leaves_no_task_behind(valkey_url: str) -> None:
    before: set[Any] = asyncio.all_tasks()
    async with connect_async(valkey_url) as client:
        await echo(client, 1)
    assert asyncio.all_tasks() == before
