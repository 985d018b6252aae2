"""A gateway's side of the Bus on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from wire import codec
from wire.bus import BadEntry, BusFull, FinishedOutput
from wire.messages import LoadSnapshot, Released, ToGateway, ToLedger, ToWorker
from wire.redis_bus.connection import (
    MAX_ENTRIES_PER_READ,
    MAX_STREAM_LENGTH,
    block_ms,
    bus_errors,
    connect_async,
    decoded,
    entries_of,
    script,
)
from wire.redis_keys import GATEWAY_LIFETIME_MS, OUTBOX_LIFETIME_S, Keys


class RedisGatewayBus:
    """A gateway's side. Always: an entry is taken out of the outbox only after it was read."""

    def __init__(
        self, url: str, gateway_id: str, *, keys: Keys | None = None, max_stream_length: int = MAX_STREAM_LENGTH
    ) -> None:
        self.gateway_id = gateway_id
        self._keys = keys or Keys()
        self._max_stream_length = max_stream_length
        self._client = connect_async(url)
        self._reads = connect_async(url)  # they block
        self._append = self._client.register_script(script("append"))
        self._append_usage = self._client.register_script(script("settle", "append_usage"))
        self._fence = self._client.register_script(script("fence"))
        self._last_outbox_id: str | bytes = "0"
        self._delivered: list[bytes] = []  # entries, taken out as the next are read: nobody's tokens wait for that
        self._loads: dict[bytes, LoadSnapshot] = {}  # as they were read last: the same bytes are the same object

    async def open(self) -> None:
        await self.heartbeat()

    async def send(self, worker_id: str, *messages: ToWorker) -> None:
        with bus_errors():
            answer = await self._append(
                keys=[self._keys.inbox(worker_id)], args=[self._max_stream_length, codec.encode(messages)]
            )
        if answer == -2:
            raise BusFull(f"the inbox of worker {worker_id} stands at its hard length")

    async def tell_gateway(self, gateway_id: str, message: ToGateway) -> None:
        outbox = self._keys.outbox(gateway_id)
        with bus_errors():
            answer = await self._append(keys=[outbox], args=[self._max_stream_length, codec.encode([message])])
            await self._client.expire(outbox, OUTBOX_LIFETIME_S)
        if answer == -2:
            raise BusFull(f"the outbox of gateway {gateway_id} stands at its hard length", gateway_id)

    async def receive(self, timeout_s: float) -> Sequence[ToGateway | BadEntry]:
        outbox = self._keys.outbox(self.gateway_id)
        reading = self._reads.xread(
            {outbox: self._last_outbox_id}, count=MAX_ENTRIES_PER_READ, block=block_ms(timeout_s)
        )
        with bus_errors():
            if self._delivered:
                _, reply = await asyncio.gather(self._reads.xdel(outbox, *self._delivered), reading)
            else:
                reply = await reading
        found = entries_of(reply)
        self._delivered = [entry_id for entry_id, _ in found]
        if found:
            self._last_outbox_id = self._delivered[-1]
        return decoded(found)

    async def loads(self) -> Sequence[LoadSnapshot]:
        with bus_errors():
            names = sorted(await cast(Any, self._client.smembers(self._keys.workers)))
            if not names:
                return []
            bodies = await self._client.mget([self._keys.load(name.decode()) for name in names])
        held = [body for body in cast(list[bytes | None], bodies) if body is not None]
        decoded = {body: self._loads.get(body) or codec.decode_load(body) for body in held}
        self._loads = {body: load for body, load in decoded.items() if load is not None}
        return list(self._loads.values())

    async def output(self, response_id: str) -> FinishedOutput | None:
        with bus_errors():
            body = await self._client.get(self._keys.output(response_id))
        return None if body is None else codec.decode_output(cast(bytes, body))

    async def append_usage(self, message: ToLedger) -> None:
        names = [self._keys.usage]
        if isinstance(message, Released):
            names.append(self._keys.response(message.response_id))
        arguments: list[int | bytes | str] = [self._max_stream_length, codec.encode([message]), message.response_id]
        with bus_errors():
            answer = await self._append_usage(keys=names, args=arguments)
        if answer == -2:
            raise BusFull("the usage stream stands at its hard length")

    async def fence(self, worker_id: str, epoch: int) -> bool:
        with bus_errors():
            return bool(await self._fence(keys=[self._keys.epoch(worker_id)], args=[epoch]))

    async def heartbeat(self) -> None:
        with bus_errors():
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.sadd(self._keys.gateways, self.gateway_id)
                pipeline.set(self._keys.alive(self.gateway_id), 1, px=GATEWAY_LIFETIME_MS)
                await pipeline.execute()

    async def close(self) -> None:
        try:
            with bus_errors():
                await self._client.delete(self._keys.alive(self.gateway_id))
        finally:
            await self._client.aclose()
            await self._reads.aclose()
