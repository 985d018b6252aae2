"""One batch driven by its owner: lines claimed, asked and written down until none is left, or until it must stop.

Always: before a line is asked again, what became of the time before is known. So whoever dies, a line that was answered
is not computed again, and one that was not answered was not charged.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, assert_never

from gateway.auth import Caller, KeyStoreDown
from gateway.batches import ids, leases
from gateway.batches.asking_lines import Reply, ask_line
from gateway.batches.endpoints import read_line
from gateway.batches.leases import Lease, OpenLine
from gateway.batches.recording import Recorder, patiently
from gateway.batches.storage import ContentLost, Storage
from gateway.batches.verdicts import Again, Done, answer_of, not_granted, stop_error, verdict
from gateway.batches.window import Window
from gateway.database_threads import DatabaseThreads
from gateway.fates import Answered, AnswerLost, EndedFree, Fates, NeverSeen, UnderWay
from gateway.postgresql import AWAY
from gateway.runtime import Runtime
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError, FinishedOutput

log = logging.getLogger(__name__)
CLAIM = 64  # lines at a time
RENEW_S = 1.0  # also how soon a cancel, a revoked key, a class taken away and the end of the window are seen
STOP_S = 0.5  # between two cancels of what does not stop
MAX_OPEN = 512  # lines of one batch that run, wait for a place, or wait to be asked again
LOOK_S = 0.25  # between two looks at an operation that goes on elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What all batches of one owner share."""

    runtime: Runtime
    window: Window
    threads: DatabaseThreads
    fates: Fates
    storage: Storage
    now: Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why no more lines are asked, and what the batch is told."""

    outcome: str
    error: dict[str, Any] | None = None


class Drive:
    """Always: every line that was claimed is written down, or stays in doubt for the next owner."""

    def __init__(self, lease: Lease, means: Means) -> None:
        self._lease = lease
        self._means = means
        self._recorder = Recorder(lease, means.threads)
        self._claimed: deque[tuple[OpenLine, bool]] = deque()  # and whether its last try is in doubt
        self._last_number = lease.claimed_up_to
        self._under_way: dict[asyncio.Task[None], OpenLine] = {}
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._content = -1
        self._caller = Caller(
            str(lease.key_id), lease.key_public_id, str(lease.tenant_id), str(lease.project_id), PriorityClass.BATCH
        )

    async def run(self) -> Ending:
        """To the end: the batch's files can be written then. Raises Fenced. Cancelled, it leaves lines in doubt."""
        means = self._means
        watching = asyncio.create_task(self._watch(), name=f"watch batch {self._lease.batch_id}")
        try:
            ending = await self._drive()
            await self._recorder.close()
            errors = [] if ending.error is None else [ending.error]
            await patiently(means.threads, partial(leases.close, self._lease, ending.outcome, means.now(), errors))
            return ending
        finally:
            watching.cancel()
            await self._stop_lines()
            if self._ending.done():
                self._ending.exception()  # told above, or nobody asks any more
            if self._content >= 0:
                os.close(self._content)

    async def _drive(self) -> Ending:
        try:
            with self._means.storage.open(self._lease.storage_name) as content:
                self._content = os.dup(content.fileno())
        except ContentLost:
            return Ending("failed", stop_error("input_file_lost", "The input file is gone."))
        doubts = await patiently(self._means.threads, partial(leases.in_doubt, self._lease))
        self._claimed.extend((line, True) for line in doubts)
        starting = asyncio.create_task(self._start_lines(), name=f"start lines of {self._lease.batch_id}")
        try:
            either: list[asyncio.Future[Any]] = [starting, self._ending]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not starting.done():
                starting.cancel()
        if not self._ending.done():
            starting.result()  # raises what went wrong
            return Ending("completed")
        ending = self._ending.result()
        stopped = await self._stop_lines()
        await self._settle_all([*stopped, *(line for line, in_doubt in self._claimed if in_doubt)])
        return ending

    async def _watch(self) -> None:
        """Keeps the lease; sees that the batch is cancelled, late, fenced, without a key or without its class.

        Whatever fails here breaks the drive off: nothing is driven unwatched.
        """
        try:
            while not self._ending.done():
                await self._look_after_the_batch()
        except Exception as error:
            self._break(error)

    async def _look_after_the_batch(self) -> None:
        """Raises Fenced."""
        status = await patiently(self._means.threads, partial(leases.renew, self._lease))
        has_class = await patiently(self._means.threads, partial(leases.has_class, self._lease.tenant_id))
        if status == "cancelling":
            self._end(Ending("cancelled"))
        elif self._means.now() >= self._lease.expires_at:
            self._end(Ending("expired"))
        elif not await self._key_is_open():
            message = "The API key in whose name the batch ran was revoked or has expired."
            self._end(Ending("failed", stop_error("invalid_api_key", message)))
        elif not has_class:
            self._end(Ending("failed", not_granted()))
        else:
            await asyncio.sleep(RENEW_S)

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _break(self, error: BaseException) -> None:
        if not self._ending.done():
            self._ending.set_exception(error)

    async def _start_lines(self) -> None:
        """Until every line has ended."""
        while (found := await self._next_line()) is not None:
            line, in_doubt = found
            while len(self._under_way) >= MAX_OPEN:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            if not in_doubt:
                await self._means.window.take(str(self._lease.tenant_id))
            task = asyncio.create_task(self._run_line(line, in_doubt=in_doubt), name=f"line {line.number}")
            self._under_way[task] = line
            task.add_done_callback(self._line_ended)
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _next_line(self) -> tuple[OpenLine, bool] | None:
        if not self._claimed:
            claim = partial(leases.claim, self._lease, self._last_number, CLAIM)
            lines = await patiently(self._means.threads, claim)
            if not lines:
                return None
            self._last_number = lines[-1].number
            self._claimed.extend((line, False) for line in lines)
        return self._claimed.popleft()

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return  # stays under way: it is settled, or left in doubt
        del self._under_way[task]
        if (error := task.exception()) is not None:
            self._break(error)

    async def _stop_lines(self) -> list[OpenLine]:
        """Nothing of this batch runs here afterwards; returns the lines that were stopped."""
        tasks = dict(self._under_way)
        running = set(tasks)
        while running:  # a handler that is just closing may swallow the first cancel
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=STOP_S)
        stopped = [line for task, line in tasks.items() if task.cancelled()]
        self._under_way.clear()
        return stopped

    async def _settle_all(self, stopped: list[OpenLine]) -> None:
        """What was under way when the batch was stopped: an answer that had come in time is kept, and paid."""
        for line in stopped:
            output = await self._last_try(line)
            if output is not None:
                await self._recorder.put(answer_of(line.number, await self._ask(line, output)))

    async def _run_line(self, line: OpenLine, *, in_doubt: bool) -> None:
        """One line to its end. A place in the window is held already where it is not in doubt."""
        tenant_id, window = str(self._lease.tenant_id), self._means.window
        has_place, num_failures = not in_doubt, 0
        try:
            while True:
                output = await self._last_try(line) if in_doubt else None
                if output is None and not has_place:
                    await window.take(tenant_id)
                    has_place = True
                reply = await self._ask(line, output)
                num_failures += reply.status == 500
                if has_place:
                    window.give(tenant_id)
                    has_place = False
                match verdict(reply, num_failures):
                    case Done():
                        await self._recorder.put(answer_of(line.number, reply))
                        return
                    case Again(wait_s=wait_s):
                        window.pause(tenant_id, wait_s)
                        await asyncio.sleep(wait_s)
                        in_doubt = True
        finally:
            if has_place:
                window.give(tenant_id)

    async def _key_is_open(self) -> bool:
        """The batch goes on in its key's name; while nobody can say whether that is shut, it counts as open."""
        try:
            return await self._means.runtime.keys.is_open(self._lease.key_public_id)
        except KeyStoreDown:
            return True

    async def _ask(self, line: OpenLine, output: FinishedOutput | None) -> Reply:
        raw = os.pread(self._content, line.num_bytes, line.start)
        return await ask_line(
            self._means.runtime,
            endpoint=self._lease.endpoint,
            caller=self._caller,
            body=bytes(read_line(raw).body),
            response_id=self._response_id(line),
            output=output,
        )

    async def _last_try(self, line: OpenLine) -> FinishedOutput | None:
        """What the last try has brought, once it has ended. None: the line is to be asked."""
        while True:
            try:
                fate = await self._means.fates.of(self._response_id(line), str(self._lease.tenant_id))
            except (BusError, *AWAY) as error:
                log.info("batch %s waits for Redis and the database: %s", self._lease.batch_id, error)
                fate = UnderWay()
            match fate:
                case NeverSeen():
                    return None
                case Answered(output=output):
                    return output
                case EndedFree():
                    await patiently(self._means.threads, partial(leases.try_again, self._lease, line))
                    return None
                case AnswerLost():
                    if await patiently(self._means.threads, partial(leases.forgive, self._lease, line)):
                        log.error("the answer to line %s of batch %s was lost", line.number, self._lease.batch_id)
                        return None
                    await asyncio.sleep(LOOK_S)
                case UnderWay():
                    await asyncio.sleep(LOOK_S)
                case _:
                    assert_never(fate)

    def _response_id(self, line: OpenLine) -> str:
        return ids.response_id(self._lease.batch_id, line.number, line.num_tries)
