"""The settler's side of the Bus on Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from redis.exceptions import ResponseError

from wire import codec
from wire.bus import BadEntry, UsageEntry
from wire.messages import ToLedger
from wire.redis_bus.connection import block_ms, bus_errors, connect, entries_of
from wire.redis_keys import USAGE_GROUP, Keys


class RedisUsageReader:
    """The settler's side. Always: an entry leaves the stream only with its acknowledgement."""

    def __init__(self, url: str, *, keys: Keys | None = None, consumer: str = "settler") -> None:
        self._stream = (keys or Keys()).usage
        self._consumer = consumer
        self._client = connect(url)

    def read(self, count: int, timeout_s: float) -> Sequence[UsageEntry]:
        with bus_errors():
            pending = self._read_group("0", count, None)
            found = pending or self._read_group(">", count, block_ms(timeout_s))
        return [
            UsageEntry(entry_id.decode(), cast(ToLedger | BadEntry, message))
            for entry_id, body in found
            for message in codec.decode(body, entry_id.decode())
        ]

    def _read_group(self, start: str, count: int, block: int | None) -> list[tuple[bytes, bytes]]:
        try:
            return self._xreadgroup(start, count, block)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        # the first read ever, or Redis came back empty
        self._client.xgroup_create(self._stream, USAGE_GROUP, id="0", mkstream=True)
        return self._xreadgroup(start, count, block)

    def _xreadgroup(self, start: str, count: int, block: int | None) -> list[tuple[bytes, bytes]]:
        reply = self._client.xreadgroup(USAGE_GROUP, self._consumer, {self._stream: start}, count=count, block=block)
        return entries_of(reply)

    def acknowledge(self, entry_ids: Sequence[str]) -> None:
        if not entry_ids:
            return
        with bus_errors(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.xack(self._stream, USAGE_GROUP, *entry_ids)
            pipeline.xdel(self._stream, *entry_ids)
            pipeline.execute()

    def close(self) -> None:
        self._client.close()
