"""The Bus on Redis or Valkey: the only file of ``wire`` that imports redis. What lies where: ``wire.redis_keys``.

Commands are retried once on a fresh connection, then the caller gets BusError: while Redis is gone everybody fails
closed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any, cast

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import PolicySnapshot, snapshot_from_dict
from wire import codec
from wire.bus import BadEntry, BusError, BusFull, Fenced, StepOutput, UsageEntry
from wire.messages import LoadSnapshot, PolicyChanged, Released, ToGateway, ToLedger, ToWorker
from wire.redis_keys import (
    ENTRY_FIELD,
    GATEWAY_LIFETIME_MS,
    LOAD_LIFETIME_MS,
    POLICY_POLL_S,
    USAGE_GROUP,
    Keys,
)

__all__ = ["Keys", "RedisGatewayBus", "RedisUsageReader", "RedisWorkerBus", "connect", "write_policy"]

MAX_STREAM_LENGTH = 100_000
MAX_ENTRIES_PER_READ = 512
MAX_BLOCK_S = 1.0  # of one blocking read; SOCKET_TIMEOUT_S must exceed it
SOCKET_TIMEOUT_S = 5.0

_OPEN = """
local taken = redis.call('GET', KEYS[1])
local last = taken and tonumber(string.match(taken, '%d+$')) or 0
local epoch = string.format('%.0f', math.max(last + 1, tonumber(redis.call('TIME')[1])))
redis.call('SET', KEYS[1], epoch)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('SADD', KEYS[4], ARGV[1])
return epoch
"""
# Only the owner of the epoch may take entries out of the inbox: a worker that was declared dead must not steal its
# successor's.
_TAKE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
return redis.call('XDEL', KEYS[2], unpack(ARGV, 2))
"""
_LOAD = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 0
"""
_APPEND = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -2 end
redis.call('XADD', KEYS[1], '*', 'm', ARGV[2])
return 0
"""
_RELEASE = "if KEYS[2] then settle(KEYS[2], ARGV[3], '', 'released', 0, 0, 0) end"
_FENCE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'fenced:' .. ARGV[1])
return 1
"""
_WRITE_POLICY = """
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[1])
return redis.call('PUBLISH', KEYS[3], ARGV[1])
"""


def _text(name: str) -> str:
    return resources.files("wire").joinpath(name).read_text(encoding="utf-8")


@contextlib.contextmanager
def _bus_errors() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise BusError(f"{type(error).__name__}: {error}") from error


def connect(url: str) -> redis.Redis:
    """A synchronous client with the Bus's time-outs and its single retry."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
    )


def write_policy(client: redis.Redis, keys: Keys, *, version: int, document: str) -> None:
    """Put a policy in force for everybody. ``document`` is the JSON text of ``policy:current``. Raises BusError."""
    with _bus_errors():
        names = (keys.policy_current, keys.policy_version, keys.policy_changed)
        client.register_script(_WRITE_POLICY)(keys=names, args=[version, document])


class RedisWorkerBus:
    """A worker's side. Always: nothing is published or taken under an epoch that is no longer this worker's."""

    def __init__(
        self, url: str, worker_id: str, *, keys: Keys | None = None, max_stream_length: int = MAX_STREAM_LENGTH
    ) -> None:
        self.worker_id = worker_id
        self._keys = keys or Keys()
        self._max_stream_length = max_stream_length
        self._client = connect(url)
        self._open = self._client.register_script(_OPEN)
        self._take = self._client.register_script(_TAKE)
        self._load = self._client.register_script(_LOAD)
        self._publish = self._client.register_script(_text("settle.lua") + _text("publish.lua"))
        self._epoch = 0
        self._last_inbox_id: str | bytes = "0"
        self._policy_version: bytes | None = None
        self._policy_due_s = 0.0
        self._sequence = 0
        self._unconfirmed: StepOutput | None = None

    def open(self) -> int:
        keys, worker_id = self._keys, self.worker_id
        names = (keys.epoch(worker_id), keys.inbox(worker_id), keys.sent(worker_id), keys.workers)
        with _bus_errors():
            self._epoch = int(cast(bytes, self._open(keys=names, args=[worker_id])))
        self._last_inbox_id = "0"
        self._policy_version, self._policy_due_s = None, 0.0
        self._sequence, self._unconfirmed = 0, None
        return self._epoch

    def receive(self, timeout_s: float) -> Sequence[ToWorker | BadEntry]:
        with _bus_errors():
            entries: list[ToWorker | BadEntry] = self._poll_policy()
            if entries:
                timeout_s = 0.0
            wait_s = min(timeout_s, MAX_BLOCK_S, max(0.0, self._policy_due_s - time.monotonic()))
            entries.extend(self._read_inbox(int(wait_s * 1_000)))
        return entries

    def _read_inbox(self, block_ms: int) -> list[ToWorker | BadEntry]:
        inbox = self._keys.inbox(self.worker_id)
        # BLOCK 0 would mean for ever
        reply = self._client.xread({inbox: self._last_inbox_id}, count=MAX_ENTRIES_PER_READ, block=block_ms or None)
        found = _entries(reply)
        if found:
            ids = [entry_id for entry_id, _ in found]
            names = (self._keys.epoch(self.worker_id), inbox)
            self._check(self._take(keys=names, args=[self._epoch, *ids]))
            self._last_inbox_id = ids[-1]
        return cast(list[ToWorker | BadEntry], _decoded(found))

    def _poll_policy(self) -> list[ToWorker | BadEntry]:
        if time.monotonic() < self._policy_due_s:
            return []
        self._policy_due_s = time.monotonic() + POLICY_POLL_S
        version = cast(bytes | None, self._client.get(self._keys.policy_version))
        if version is None or version == self._policy_version:
            return []
        document = cast(bytes | None, self._client.get(self._keys.policy_current))
        self._policy_version = version
        try:
            return [PolicyChanged(snapshot=_policy(document))]
        except (PolicyError, ValueError, KeyError, TypeError) as error:
            return [BadEntry("policy:current", f"policy {version.decode()}: {error}")]

    def publish(self, output: StepOutput) -> None:
        if output is not self._unconfirmed:
            self._sequence += 1
            self._unconfirmed = output
        names, arguments = self._publish_call(output)
        with _bus_errors():
            answer = int(cast(int, self._publish(keys=names, args=arguments)))
        self._check(answer)
        if answer == -2:
            raise BusFull("the usage stream stands at its hard length")
        if answer > 0:
            gateway_id = list(output.to_gateways)[answer - 1]
            raise BusFull(f"the outbox of gateway {gateway_id} stands at its hard length", gateway_id)
        self._unconfirmed = None

    def _publish_call(self, output: StepOutput) -> tuple[list[str], list[str | bytes | int]]:
        keys = self._keys
        names = [keys.epoch(self.worker_id), keys.sent(self.worker_id), keys.usage]
        names.extend(keys.outbox(gateway_id) for gateway_id in output.to_gateways)
        names.extend(keys.response(usage.response_id) for usage in output.usages)
        names.extend(keys.output(response_id) for response_id in output.outputs)
        names.append(keys.counted(self.worker_id))
        arguments: list[str | bytes | int] = [
            self._epoch,
            self._sequence,
            self._max_stream_length,
            self._max_stream_length,
            len(output.to_gateways),
            len(output.usages),
            len(output.outputs),
        ]
        arguments.extend(codec.encode(messages) for messages in output.to_gateways.values())
        for usage in output.usages:
            arguments.extend((codec.encode([usage]), usage.response_id, usage.attempt, usage.terminal))
            arguments.extend((usage.prompt_tokens, usage.cached_tokens, usage.output_tokens))
        arguments.extend(codec.encode_output(token_ids) for token_ids in output.outputs.values())
        return names, arguments

    def publish_load(self, load: LoadSnapshot) -> None:
        names = (self._keys.epoch(self.worker_id), self._keys.load(self.worker_id))
        with _bus_errors():
            answer = self._load(keys=names, args=[self._epoch, codec.encode_load(load), LOAD_LIFETIME_MS])
        self._check(answer)

    def _check(self, answer: object) -> None:
        if answer == -1:
            raise Fenced(f"epoch {self._epoch} of worker {self.worker_id} has been fenced")

    def live_gateways(self) -> frozenset[str]:
        with _bus_errors():
            names = [name.decode() for name in cast(set[bytes], self._client.smembers(self._keys.gateways))]
            if not names:
                return frozenset()
            alive = cast(list[bytes | None], self._client.mget([self._keys.alive(name) for name in names]))
            dead = [name for name, beat in zip(names, alive, strict=True) if beat is None]
            if dead:
                self._client.srem(self._keys.gateways, *dead)
        return frozenset(names).difference(dead)

    def close(self) -> None:
        self._client.close()


class RedisGatewayBus:
    """A gateway's side. Always: an entry is taken out of the outbox only after it was read."""

    def __init__(
        self, url: str, gateway_id: str, *, keys: Keys | None = None, max_stream_length: int = MAX_STREAM_LENGTH
    ) -> None:
        self.gateway_id = gateway_id
        self._keys = keys or Keys()
        self._max_stream_length = max_stream_length
        self._client = redis.asyncio.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            retry=AsyncRetry(NoBackoff(), 1),
        )
        self._append = self._client.register_script(_APPEND)
        self._append_usage = self._client.register_script(
            _text("settle.lua") + _APPEND.replace("return 0", _RELEASE + "\nreturn 0")
        )
        self._fence = self._client.register_script(_FENCE)
        self._last_outbox_id: str | bytes = "0"

    async def open(self) -> None:
        await self.heartbeat()

    async def send(self, worker_id: str, message: ToWorker) -> None:
        with _bus_errors():
            answer = await self._append(
                keys=[self._keys.inbox(worker_id)], args=[self._max_stream_length, codec.encode([message])]
            )
        if answer == -2:
            raise BusFull(f"the inbox of worker {worker_id} stands at its hard length")

    async def receive(self, timeout_s: float) -> Sequence[ToGateway | BadEntry]:
        outbox = self._keys.outbox(self.gateway_id)
        block_ms = int(min(timeout_s, MAX_BLOCK_S) * 1_000)
        with _bus_errors():
            reply = await self._client.xread(
                {outbox: self._last_outbox_id}, count=MAX_ENTRIES_PER_READ, block=block_ms or None
            )
            found = _entries(reply)
            if not found:
                return []
            ids = [entry_id for entry_id, _ in found]
            await self._client.xdel(outbox, *ids)
        self._last_outbox_id = ids[-1]
        return cast(list[ToGateway | BadEntry], _decoded(found))

    async def loads(self) -> Sequence[LoadSnapshot]:
        with _bus_errors():
            names = sorted(await cast(Any, self._client.smembers(self._keys.workers)))
            if not names:
                return []
            bodies = await self._client.mget([self._keys.load(name.decode()) for name in names])
        decoded = [codec.decode_load(body) for body in cast(list[bytes | None], bodies) if body is not None]
        return [load for load in decoded if load is not None]

    async def output(self, response_id: str) -> Sequence[Sequence[int]] | None:
        with _bus_errors():
            body = await self._client.get(self._keys.output(response_id))
        return None if body is None else codec.decode_output(cast(bytes, body))

    async def append_usage(self, message: ToLedger) -> None:
        names = [self._keys.usage]
        if isinstance(message, Released):
            names.append(self._keys.response(message.response_id))
        arguments: list[int | bytes | str] = [self._max_stream_length, codec.encode([message]), message.response_id]
        with _bus_errors():
            answer = await self._append_usage(keys=names, args=arguments)
        if answer == -2:
            raise BusFull("the usage stream stands at its hard length")

    async def fence(self, worker_id: str, epoch: int) -> bool:
        with _bus_errors():
            return bool(await self._fence(keys=[self._keys.epoch(worker_id)], args=[epoch]))

    async def heartbeat(self) -> None:
        with _bus_errors():
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.sadd(self._keys.gateways, self.gateway_id)
                pipeline.set(self._keys.alive(self.gateway_id), 1, px=GATEWAY_LIFETIME_MS)
                await pipeline.execute()

    async def close(self) -> None:
        with _bus_errors():
            await self._client.delete(self._keys.alive(self.gateway_id))
            await self._client.aclose()


class RedisUsageReader:
    """The settler's side. Always: an entry leaves the stream only with its acknowledgement."""

    def __init__(self, url: str, *, keys: Keys | None = None, consumer: str = "settler") -> None:
        self._stream = (keys or Keys()).usage
        self._consumer = consumer
        self._client = connect(url)

    def read(self, count: int, timeout_s: float) -> Sequence[UsageEntry]:
        with _bus_errors():
            pending = self._read_group("0", count, None)
            found = pending or self._read_group(">", count, int(min(timeout_s, MAX_BLOCK_S) * 1_000) or None)
        return [
            UsageEntry(entry_id.decode(), cast(ToLedger | BadEntry, message))
            for entry_id, body in found
            for message in codec.decode(body, entry_id.decode())
        ]

    def _read_group(self, start: str, count: int, block_ms: int | None) -> list[tuple[bytes, bytes]]:
        try:
            return self._xreadgroup(start, count, block_ms)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        # the first read ever, or Redis came back empty
        self._client.xgroup_create(self._stream, USAGE_GROUP, id="0", mkstream=True)
        return self._xreadgroup(start, count, block_ms)

    def _xreadgroup(self, start: str, count: int, block_ms: int | None) -> list[tuple[bytes, bytes]]:
        reply = self._client.xreadgroup(USAGE_GROUP, self._consumer, {self._stream: start}, count=count, block=block_ms)
        return _entries(reply)

    def acknowledge(self, entry_ids: Sequence[str]) -> None:
        if not entry_ids:
            return
        with _bus_errors(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.xack(self._stream, USAGE_GROUP, *entry_ids)
            pipeline.xdel(self._stream, *entry_ids)
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


def _entries(reply: Any) -> list[tuple[bytes, bytes]]:
    """(entry id, body) of a read of one stream, in the shape of protocol 2. A deleted entry has no fields."""
    return [
        (entry_id, (fields or {}).get(ENTRY_FIELD, b"")) for _, entries in reply or () for entry_id, fields in entries
    ]


def _decoded(found: Sequence[tuple[bytes, bytes]]) -> list[Any]:
    return [message for entry_id, body in found for message in codec.decode(body, entry_id.decode())]


def _policy(document: bytes | None) -> PolicySnapshot:
    if document is None:
        raise ValueError("there is a version and no document")
    return snapshot_from_dict(json.loads(document)["policy"])
