"""What became of an operation, and its answer shown again after its owner has died."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from gateway.auth import Caller
from gateway.batches.asking_lines import ask_line
from gateway.batches.services import Owner
from gateway.database_threads import DatabaseThreads
from gateway.fates import Answered, AnswerLost, EndedFree, Fate, Fates, NeverSeen, UnderWay
from gateway.runtime import Runtime
from scheduler_engine.policy import PriorityClass
from tests.gateway.batches.conftest import owner_of, request_line

CHAT = "/v1/chat/completions"


class Line:
    """One operation of Bulk, asked through a gateway of the test's own."""

    def __init__(self, runtime: Runtime, owner: Owner, **body: Any) -> None:
        self.runtime = runtime
        self.response_id = str(uuid4())
        self.caller = Caller(
            str(owner.key_id), owner.key_public_id, str(owner.tenant_id), str(owner.project_id), PriorityClass.BATCH
        )
        self._body = json.dumps(request_line("a", **body)["body"]).encode()
        self._threads = DatabaseThreads()
        self.fates = Fates(
            ownership=runtime.ownership,
            bus=runtime.bus,
            threads=self._threads,
            is_served_here=lambda response_id: runtime.streams.get(response_id) is not None,
        )

    async def ask(self, output: Any = None) -> Any:
        return await ask_line(
            self.runtime,
            endpoint=CHAT,
            caller=self.caller,
            body=self._body,
            response_id=self.response_id,
            output=output,
        )

    async def fate(self) -> Fate:
        return await self.fates.of(self.response_id, self.caller.tenant_id)

    async def until(self, kind: type[Fate]) -> Fate:
        async with asyncio.timeout(10):
            while True:
                found = await self.fate()
                if isinstance(found, kind):
                    return found
                await asyncio.sleep(0.05)


async def _has_a_worker(runtime: Runtime) -> None:
    while True:
        if runtime.loads:
            return
        await asyncio.sleep(0.05)


def with_runtime(work: Callable[[Runtime, Owner], Awaitable[None]], key: str) -> None:
    """``work`` with a gateway of its own, in Bulk's name."""
    asyncio.run(_with_runtime(work, owner_of(key)))


async def _with_runtime(work: Callable[[Runtime, Owner], Awaitable[None]], owner: Owner) -> None:
    runtime = Runtime.from_settings()
    await runtime.start()
    try:
        async with asyncio.timeout(20):
            await _has_a_worker(runtime)
        await work(runtime, owner)
    finally:
        await runtime.stop()


def test_an_answer_that_nobody_wrote_down_is_shown_again_word_for_word(
    books: dict[str, str], worker: subprocess.Popen[bytes]
) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        line = Line(runtime, bulk, max_completion_tokens=9, seed=1)
        assert isinstance(await line.fate(), NeverSeen)
        first = await line.ask()
        found = await line.until(Answered)
        assert isinstance(found, Answered)
        again = await line.ask(found.output)
        assert (first.status, again.status) == (200, 200)
        assert _told(again) == _told(first)

    with_runtime(work, books["bulk"])


def _told(reply: Any) -> Any:
    return {name: value for name, value in json.loads(reply.body).items() if name != "created"}


def test_the_same_operation_is_never_let_in_twice(books: dict[str, str], worker: subprocess.Popen[bytes]) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        line = Line(runtime, bulk)
        assert (await line.ask()).status == 200
        second = await line.ask()
        assert (second.status, second.code) == (503, "overloaded")
        assert isinstance(await line.fate(), Answered)

    with_runtime(work, books["bulk"])


def test_an_answer_that_redis_has_forgotten_is_lost_and_told_so(
    books: dict[str, str], worker: subprocess.Popen[bytes], settle: Any
) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        line = Line(runtime, bulk)
        await line.ask()
        await asyncio.to_thread(settle)
        keys = runtime.redis_keys
        await runtime.redis.delete(keys.response(line.response_id), keys.output(line.response_id))
        assert isinstance(await line.fate(), AnswerLost)

    with_runtime(work, books["bulk"])


def test_what_a_batch_stops_ends_at_no_charge(books: dict[str, str], worker: subprocess.Popen[bytes]) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        line = Line(runtime, bulk, max_completion_tokens=2_000, ignore_eos=True)
        asking = asyncio.create_task(line.ask())
        await line.until(UnderWay)
        asking.cancel()
        assert isinstance(await line.until(EndedFree), EndedFree)

    with_runtime(work, books["bulk"])


def test_an_operation_that_was_let_in_and_that_nobody_serves_is_given_up(
    books: dict[str, str], worker: subprocess.Popen[bytes]
) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        line = Line(runtime, bulk, max_completion_tokens=2_000, ignore_eos=True)
        asking = asyncio.create_task(line.ask())
        await line.until(UnderWay)
        stream = runtime.streams.get(line.response_id)
        assert stream is not None
        runtime.streams.forget(stream)
        assert isinstance(await line.until(EndedFree), EndedFree)
        asking.cancel()

    with_runtime(work, books["bulk"])


def test_a_line_that_is_stopped_half_way_through_the_door_holds_nothing(
    books: dict[str, str], worker: subprocess.Popen[bytes]
) -> None:
    async def work(runtime: Runtime, bulk: Owner) -> None:
        for num_turns in range(12):
            line = Line(runtime, bulk, max_completion_tokens=2_000, ignore_eos=True)
            asking = asyncio.create_task(line.ask())
            for _ in range(num_turns):
                await asyncio.sleep(0.001 if num_turns > 4 else 0)
            asking.cancel()
            await asyncio.wait([asking])
            await asyncio.sleep(0.1)
            if not isinstance(await line.fate(), NeverSeen):
                assert isinstance(await line.until(EndedFree), EndedFree)
        assert len(runtime.streams) == 0

    with_runtime(work, books["bulk"])
