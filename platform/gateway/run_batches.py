"""The owner of batches: leases them from PostgreSQL and drives each until it is over. Any number of owners may run.

A gateway without a socket: its lines are let in, dispatched and read like anybody's. Refuses to know what a line asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial

from gateway.background import Repeated
from gateway.batches import leases, wishes
from gateway.batches.driving import Drive, Ending, Means
from gateway.batches.leases import Lease
from gateway.batches.recording import patiently
from gateway.batches.storage import Storage
from gateway.batches.window import Window
from gateway.database_threads import DatabaseThreads
from gateway.fates import Fates
from gateway.runtime import Runtime
from scheduler_engine.policy import PriorityClass

log = logging.getLogger(__name__)
MAX_BATCHES = 32  # that one owner drives at a time
TAKE_S = 0.5  # how soon a new batch is seen
LOOK_S = 0.05  # how soon a pause is over and a freed slot is used


class BatchOwner:
    """Always: a batch is driven here under one lease, and given back when this process is told to stop."""

    def __init__(self, runtime: Runtime, storage: Storage, now: Callable[[], datetime]) -> None:
        """``runtime`` has been started, and is stopped by whoever started it."""
        threads = DatabaseThreads()
        self._runtime = runtime
        self._threads = threads
        self._window = Window(lambda: runtime.loads, self._concurrency, time.monotonic)
        fates = Fates(
            ownership=runtime.ownership,
            bus=runtime.bus,
            threads=threads,
            is_served_here=lambda response_id: runtime.streams.get(response_id) is not None,
        )
        self._means = Means(
            runtime=runtime, window=self._window, threads=threads, fates=fates, storage=storage, now=now
        )
        self._driving: dict[asyncio.Task[Ending], Lease] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop."""
        looking = Repeated(self._look_after_the_window, LOOK_S)
        looking.start()
        try:
            while not stop.is_set():
                await self._take_some()
                await _either(stop, TAKE_S)
        finally:
            await looking.stop()
            await self._let_go()
            self._threads.close()

    async def _take_some(self) -> None:
        room = MAX_BATCHES - len(self._driving)
        if room <= 0:
            return
        take = partial(leases.take, self._runtime.bus.gateway_id, room)
        for lease in await patiently(self._threads, take):
            drive = Drive(lease, self._means)
            task = asyncio.create_task(drive.run(), name=f"batch {lease.batch_id}")
            self._driving[task] = lease
            task.add_done_callback(self._ended)
            log.info("batch %s is driven here under token %s", lease.batch_id, lease.fencing_token)

    def _ended(self, task: asyncio.Task[Ending]) -> None:
        """A drive that broke keeps its lease until it runs out: the next owner comes after a pause."""
        lease = self._driving.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, leases.Fenced):
            log.warning("%s", error)
        elif error is not None:
            log.error("batch %s broke off", lease.batch_id, exc_info=error)
        else:
            log.info("batch %s is driven no more: %s", lease.batch_id, task.result().outcome)
            asyncio.get_running_loop().run_in_executor(None, wishes.ask_for, wishes.FINALISE, lease.batch_id)

    async def _let_go(self) -> None:
        driving = dict(self._driving)
        for task in driving:
            task.cancel()
        if driving:
            await asyncio.wait(driving)
        for lease in driving.values():
            await self._threads.run(partial(leases.release, lease))

    async def _look_after_the_window(self) -> None:
        self._window.look()

    def _concurrency(self, tenant_id: str) -> int | None:
        """A tenant's cap in the batch class. Where it is granted none, its first line is told so at the door."""
        view = self._runtime.policy.view
        quota = None if view is None else view.quota(tenant_id, PriorityClass.BATCH)
        return None if quota is None or not quota.concurrency else quota.concurrency


async def _either(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
