"""What one gateway process keeps running: its Bus, its readers, its caches. Started and stopped by the ASGI lifespan.

Knows the parts and in which order they live; refuses to know requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

from django.conf import settings
from django.db import connections
from psycopg.conninfo import make_conninfo
from redis.asyncio import Redis

from gateway.admission import Admission
from gateway.auth import Keys as ApiKeys
from gateway.auth import KeyTable
from gateway.background import Repeated, waited_out
from gateway.batches.archive import Archive
from gateway.console.switchboard import switchboard
from gateway.continuity import Continuity
from gateway.door import Door
from gateway.fates import Fates
from gateway.holding import Holding
from gateway.loads import ages, books
from gateway.loads import loads as load_source
from gateway.ownership import Ownership
from gateway.policy_feed import PolicyFeed
from gateway.rebuild import GateBuilder
from gateway.response_stream import Reader
from gateway.stored.shelf import DatabaseShelf, ResponseShelf
from gateway.streams import Streams
from gateway.text import Text, byte_text
from tenants import services
from wire.bus import BusError, GatewayBus
from wire.messages import Explained, LoadSnapshot
from wire.redis_bus import RedisGatewayBus, connect_async
from wire.redis_keys import Keys

log = logging.getLogger(__name__)
Result = TypeVar("Result")

READ_S = 0.25  # longest wait of one outbox read; also bounds how long a drain takes
WATCH_S = 0.25  # how often workers' snapshots are read
HEARTBEAT_S = 2.0
USED_KEYS_S = 60.0
KEY_CHECK_S = 5.0
BOOKS_S = 5.0
STORE_S = 0.25
OWED_S = 1.0
ADOPT_S = 1.0  # a worker waits three seconds longer for a gateway than its heartbeat lives
TOLD_S = 1.0  # how soon a policy that was saved while Redis did not listen is told
GATE_S = 0.5  # how soon a Redis that lost everything is noticed
LAST_WORDS_S = 1.0  # how long a reader may take to pass on that this gateway goes


class Runtime:
    """Always: between ``start`` and ``stop`` every loop runs; one that fails goes on, as soon as it can again."""

    def __init__(
        self,
        *,
        bus: GatewayBus,
        redis: Redis,
        redis_keys: Keys,
        key_table: KeyTable,
        texts: Sequence[Text],
        body_limit_bytes: int,
        build_gate: Callable[[], bool],
        archive: Archive | None = None,
        shelf: ResponseShelf | None = None,
    ) -> None:
        self.bus = bus
        self.body_limit_bytes = body_limit_bytes
        self.archive = archive
        self.keys = ApiKeys(key_table.find, is_told=lambda: self.policy.is_listening)
        self.policy = PolicyFeed(redis, redis_keys, self.keys.forget)
        self.admission = Admission(redis, redis_keys)
        self.streams = Streams(time.monotonic)
        self.loads: Sequence[LoadSnapshot] = ()
        self.ownership = Ownership(redis, redis_keys)
        self.door = Door(
            bus=bus,
            admission=self.admission,
            streams=self.streams,
            ownership=self.ownership,
            texts={text.model: text for text in texts},
            policy=self.policy,
            loads=lambda: self.loads,
        )
        self.continuity = Continuity(
            bus=bus,
            streams=self.streams,
            ownership=self.ownership,
            loads=lambda: self.loads,
            take_back=self.door.take_back,
            shelf=shelf,
        )
        self.fates = Fates(ownership=self.ownership, bus=bus, threads=None if archive is None else archive.threads)
        self.holding = Holding(bus=bus, admission=self.admission, streams=self.streams, ownership=self.ownership)
        self.redis, self.redis_keys = redis, redis_keys
        self._gate_built = redis_keys.gate_built
        self._books_key = redis_keys.books
        self._build_gate = build_gate
        self._building: asyncio.Task[bool] | None = None
        self._key_table = key_table
        self._reads_done = asyncio.Condition()
        self._num_reads = self._num_key_changes = 0
        self._going: asyncio.Task[None] | None = None
        self.is_going = asyncio.Event()
        self._stack = AsyncExitStack()

    @classmethod
    def from_settings(cls) -> Runtime:
        """Raises wire.gguf_header.ModelFileError when the model file is no good."""
        redis_keys = Keys(settings.RUBATO_REDIS_PREFIX)
        text = Text.of_model(settings.RUBATO_MODEL_PATH) if settings.RUBATO_MODEL_PATH else byte_text()
        database = settings.DATABASES["default"]
        conninfo = make_conninfo(
            dbname=database["NAME"],
            user=database["USER"],
            password=database["PASSWORD"],
            host=database["HOST"],
            port=database["PORT"],
            **{name: value for name, value in database["OPTIONS"].items() if name != "pool"},
        )
        archive = Archive.from_settings()
        return cls(
            bus=RedisGatewayBus(settings.REDIS_URL, f"gateway-{uuid.uuid4().hex[:12]}", keys=redis_keys),
            redis=connect_async(settings.REDIS_URL),
            redis_keys=redis_keys,
            key_table=KeyTable(conninfo),
            texts=[text],
            body_limit_bytes=settings.RUBATO_BODY_LIMIT_BYTES,
            build_gate=GateBuilder(settings.REDIS_URL, redis_keys).build,
            archive=archive,
            shelf=DatabaseShelf(archive.threads),
        )

    @classmethod
    async def started(cls) -> Runtime:
        """One that runs; what does not answer yet is waited for. Raises ModelFileError."""

        async def begin() -> Runtime:
            made = cls.from_settings()
            await made.start()
            return made

        return await waited_out(begin, "the start")

    async def start(self) -> None:
        """Raises BusError, RedisError or DatabaseError when one of them is not there; nothing is left open then."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        stack = self._stack
        stack.push_async_callback(self.redis.aclose)
        if self.archive is not None:
            stack.callback(self.archive.threads.close)
        await self._key_table.open()
        stack.push_async_callback(self._key_table.close)
        await self.bus.open()
        stack.push_async_callback(self.bus.close)
        await self._keep_gate()
        await self.policy.start(partial(_in_database_thread, services.publish_policy))
        stack.push_async_callback(self.policy.stop)
        ages.read_from({"policy": lambda: self.policy.age_s, "keys": lambda: self.policy.silent_s})
        stack.callback(ages.read_from, {})
        stack.push_async_callback(self.door.close)
        self.loads = await self.bus.loads()
        load_source.read_from(self.bus.loads)
        stack.callback(load_source.read_from, None)
        switchboard.connect(self.bus)
        stack.callback(switchboard.connect, None)
        for work, period_s in (
            (self._read_outbox, 0.0),
            (self._watch_workers, WATCH_S),
            (self._beat, HEARTBEAT_S),
            (self.holding.renew, HEARTBEAT_S),
            (self._keep_gate, GATE_S),
            (self._tell_policy, TOLD_S),
            (self._note_used_keys, USED_KEYS_S),
            (self._watch_keys, 0.0),
            (self._read_books, BOOKS_S),
            (self.continuity.adopt, ADOPT_S),
            (self.continuity.store_ended, STORE_S),
            (self.door.owed.pay, OWED_S),
        ):
            repeated = Repeated(work, period_s)
            repeated.start()
            stack.push_async_callback(repeated.stop)

    def go_away(self) -> None:
        """Ends what is open and lets nobody in any more; ``stop`` follows when the server's connections have ended."""
        if self._going is None:
            self._going = asyncio.create_task(self._go_away(), name="go_away")

    async def _go_away(self) -> None:
        self.is_going.set()
        await self.door.close()
        await asyncio.sleep(LAST_WORDS_S)
        for stream in self.streams:
            for reader in stream.readers:  # its client does not read, and would hold up the server
                _cancel(reader)

    async def stop(self) -> None:
        if self._going is not None:
            await _stopped(self._going)
        await self._stack.aclose()

    async def _read_outbox(self) -> None:
        messages = await self.bus.receive(READ_S)
        self.streams.deliver(messages)
        for message in messages:
            if isinstance(message, Explained):
                switchboard.hear(message)
        async with self._reads_done:
            self._num_reads += 1
            self._reads_done.notify_all()

    async def _drained(self) -> None:
        """Until an outbox read that began after this call has been delivered."""
        async with self._reads_done:
            target = self._num_reads + 2
            await self._reads_done.wait_for(lambda: self._num_reads >= target)

    async def _read_books(self) -> None:
        held = await self.redis.get(self._books_key)
        books.newest = json.loads(held) if isinstance(held, bytes) else None

    async def _note_used_keys(self) -> None:
        await self._key_table.note_used(self.keys.take_used())

    async def _watch_keys(self) -> None:
        """A revoked key ends what it asked for: at once where a push comes, else when its cached record is too old."""
        self._num_key_changes = await self.keys.until_changed(self._num_key_changes, KEY_CHECK_S)
        await self.door.end_closed_keys(self.keys.is_open)

    async def _watch_workers(self) -> None:
        try:
            self.loads = await self.bus.loads()
        except BusError:
            self.loads = ()
            self.streams.pardon()
            raise
        for worker_id, epoch in self.streams.lost_workers(self.loads):
            # After the fence nothing of that epoch can be published any more; what was published is read first.
            await self.bus.fence(worker_id, epoch)
            await self._drained()
            await self.continuity.worker_died(worker_id, epoch)
        await self.continuity.go_on()

    async def _keep_gate(self) -> None:
        """A Redis that came back empty lets nobody in (limits.lua) until its gate is built again."""
        if await self.redis.exists(self._gate_built):
            return
        if self._building is None or self._building.done():  # one build at a time, however long it takes
            self._building = asyncio.create_task(_in_database_thread(self._build_gate), name="build gate")
        if await asyncio.shield(self._building):
            log.info("the gate was built from the books")

    async def _tell_policy(self) -> None:
        """PostgreSQL is the truth: what was saved there and is not in Redis was not heard, or was lost."""
        newest, view = await self._key_table.newest_policy(), self.policy.view
        if view is None or newest <= view.version or await self.policy.catch_up():
            return
        await _in_database_thread(services.publish_policy)
        log.info("policy %s is told again: Redis did not know it", newest)

    async def _beat(self) -> None:
        await self.bus.heartbeat()
        self.door.end_forgotten()
        for stream in self.streams:
            for reader in stream.stalled_readers:
                log.warning("response %s is not being read; closing it", stream.response_id)
                _cancel(reader)


def _cancel(reader: Reader) -> None:
    if reader.task is not None:
        reader.task.cancel()


_current: list[Runtime] = []


def current() -> Runtime | None:
    """The runtime of this process, while its ASGI lifespan lasts."""
    return _current[-1] if _current else None


def set_current(runtime: Runtime | None) -> None:
    _current[:] = [] if runtime is None else [runtime]


async def _in_database_thread(work: Callable[[], Result]) -> Result:
    """The database is the truth behind what Redis has lost. A thread leaves no connection behind."""

    def run() -> Result:
        try:
            return work()
        finally:
            connections.close_all()

    return await asyncio.to_thread(run)


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
