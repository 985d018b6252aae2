"""A service that does not serve yet is waited for: by each process at its start, and by who keeps them alive."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, OperationalError
from redis.exceptions import BusyLoadingError

from gateway.auth import KeyStoreDown
from gateway.background import waited_out
from gateway.embedded import EmbeddedPostgres, EmbeddedValkey
from gateway.embedded.service import dying_with_parent
from gateway.supervision.platform_processes import PlatformOptions, base_environment, platform_stages, worker_is_ready
from gateway.supervision.process import ProcessSpec
from tests.wire.scripted_redis import Session
from wire.bus import BusError

NOBODY = "postgresql://nobody:x@127.0.0.1:1/nothing"
QUESTIONS = 3  # more than one try asks
PATIENCE_S = 60.0
GREETING = (b"CLIENT", b"AUTH", b"HELLO")
ANSWERS = {
    "loading": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "broken disk": b"-MISCONF Errors writing to the AOF file: No space left on device\r\n",
    "full": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "locked": b"-NOAUTH Authentication required.\r\n",
    "of another kind": b"*1\r\n:7\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "hung up": b"",
}


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A Redis that says this to every question, or hangs up. Yields its port and the questions so far."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(reader, writer)
        try:
            async for command in session.commands():
                if command[0] not in GREETING:
                    asked.append(command[0])
                await session.say(b"+OK\r\n" if command[0] in GREETING else answer)
                if not answer:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            session.hang_up()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()


@contextmanager
def started(spec: ProcessSpec, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*dying_with_parent(spec.stop_signal), *spec.command()]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=dict(spec.environment), stdout=file, stderr=file, process_group=0)
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def specs(folder: Path, redis_port: int) -> dict[str, ProcessSpec]:
    """Every process of the platform, where no database is and this Redis."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    options = PlatformOptions(root=root, data=folder, port=port, executor="simulated", model=None)
    addresses = dict.fromkeys(("DATABASE_URL", "DATABASE_TENANT_URL", "DATABASE_OWNER_URL"), NOBODY)
    environment = base_environment(options, {**addresses, "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0"})
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'platform'}"
    return {spec.name: spec for stage in platform_stages(options, environment) for spec in stage}


async def test_every_process_waits_at_its_start_for_a_redis_that_is_loading(tmp_path: Path) -> None:
    questions: dict[str, list[bytes]] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    async with AsyncExitStack() as servers, asyncio.timeout(PATIENCE_S):
        with ExitStack() as processes:
            for name in specs(tmp_path, 0):
                port, questions[name] = await servers.enter_async_context(answering(ANSWERS["loading"]))
                spec = specs(tmp_path, port)[name]
                running[name] = processes.enter_context(started(spec, tmp_path / f"{name}.log"))
            while any(len(asked) < QUESTIONS for asked in questions.values()):
                ended = {name for name, process in running.items() if process.poll() is not None}
                assert not ended, {name: (tmp_path / f"{name}.log").read_text()[-2_000:] for name in ended}
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_worker_whose_redis_answers_anything_else_is_not_ready(answer: str) -> None:
    async with answering(ANSWERS[answer]) as (port, _):
        assert not await asyncio.to_thread(worker_is_ready, f"redis://127.0.0.1:{port}/0")


def test_a_worker_whose_redis_is_not_there_is_not_ready() -> None:
    assert not worker_is_ready("redis://127.0.0.1:1/0")


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_valkey_that_answers_anything_else_is_not_ready(answer: str, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    valkey.prepare()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(b"+OK\r\n" + ANSWERS[answer])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", int((tmp_path / "valkey" / "port").read_text())):
        assert not await asyncio.to_thread(valkey.is_ready)


class Elsewhere(EmbeddedPostgres):
    """One that is looked for at a port of the test's."""

    port = 1

    def url(self, role: str) -> str:
        return f"postgresql://{role}:x@127.0.0.1:{self.port}/rubato?sslmode=disable"


STARTING_UP = b"SFATAL\0C57P03\0Mthe database system is starting up\0\0"
WORDS = {
    "starting up": b"E" + (len(STARTING_UP) + 4).to_bytes(4, "big") + STARTING_UP,
    "hung up": b"",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "of another kind": b"R\x00\x00\x00\x08\x00\x00\x00\x63",
}


@pytest.mark.parametrize("words", WORDS)
async def test_a_postgresql_that_says_anything_else_is_not_ready(words: str, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(WORDS[words])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        postgres = Elsewhere(tmp_path)
        postgres.port = server.sockets[0].getsockname()[1]
        assert not await asyncio.to_thread(postgres.is_ready)


@pytest.mark.parametrize(
    "outage", [BusError, BusyLoadingError, OperationalError, InterfaceError, DatabaseError, KeyStoreDown]
)
async def test_an_outage_at_the_start_is_told_once_and_waited_out(
    outage: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    answers: Iterator[Any] = iter([outage("away"), outage("away"), "there"])

    async def begin() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    with caplog.at_level(logging.WARNING):
        assert await waited_out(begin, "the start", again_s=0.0) == "there"
    assert [record.getMessage() for record in caplog.records] == ["the start waits: away"]


async def test_what_is_no_outage_ends_the_start() -> None:
    async def begin() -> None:
        raise ValueError("a wrong file")

    with pytest.raises(ValueError, match="a wrong file"):
        await waited_out(begin, "the start")


async def test_a_start_that_waits_can_be_given_up_though_who_is_asked_swallows_that() -> None:
    is_asked = asyncio.Event()

    async def begin() -> None:
        is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise BusError("away") from error

    task = asyncio.create_task(waited_out(begin, "the start"))
    await is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
