"""What Redis holds of responses and money, read for the settler and for ``reconcile``. Refuses to admit anybody.

Synchronous, for management commands; every failure is a BusError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

from billing.engine_counts import EngineTotals
from wire import codec
from wire.bus import BadEntry, BusError
from wire.messages import Released, ToLedger
from wire.redis_bus import RedisGatewayBus, bus_errors, connect
from wire.redis_keys import BOOKS_LIFETIME_S, ENTRY_FIELD, Keys

SCAN_COUNT = 500


@dataclass(frozen=True, slots=True)
class Record:
    """The state of one response and the gateway that owns it."""

    state: str
    gateway_id: str


@dataclass(frozen=True, slots=True)
class Window:
    """One money window of a tenant and class."""

    open_micros: int
    settled_micros: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What a money window has taken: for calls that ended, and at worst for those under way. ``refused_ms``: when it
    first could not cover a call; None before that.
    """

    settled_micros: int
    open_micros: int
    refused_ms: int | None


class Gate:
    """Always: reads only, but for ``end``, which ends a response by the same script as everybody else, and for what is
    told of the books.
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self._keys = keys
        self._client = connect(url)
        self._runner = asyncio.Runner()
        self._bus = RedisGatewayBus(url, "settler", keys=keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BusError):  # Redis may be gone before us
            self._runner.run(self._bus.close())
        self._runner.close()
        self._client.close()

    def records(self, response_ids: Sequence[str]) -> Mapping[str, Record]:
        """Those that exist."""
        with bus_errors(), self._client.pipeline(transaction=False) as pipeline:
            for response_id in response_ids:
                pipeline.hmget(self._keys.response(response_id), "state", "gateway")
            found = pipeline.execute()
        return {
            response_id: Record(state.decode(), (gateway or b"").decode())
            for response_id, (state, gateway) in zip(response_ids, found, strict=True)
            if state is not None
        }

    def live_gateways(self, gateway_ids: Sequence[str]) -> frozenset[str]:
        """Those of the given ones whose heartbeat is fresh."""
        names = [self._keys.alive(gateway_id) for gateway_id in gateway_ids]
        if not names:
            return frozenset()
        with bus_errors():
            values = cast(list[bytes | None], self._client.mget(names))
        return frozenset(name for name, value in zip(gateway_ids, values, strict=True) if value is not None)

    def num_waiting_usages(self) -> int:
        """Entries of the usage stream that the books have not acknowledged."""
        with bus_errors():
            return self._client.xlen(self._keys.usage)

    def windows(self) -> Mapping[tuple[str, str, str], Window]:
        """All money windows by (tenant id, class, window id)."""
        prefix = f"{self._keys.prefix}money:"
        found = {}
        with bus_errors():
            for name in self._client.scan_iter(match=f"{prefix}*", count=SCAN_COUNT):
                tenant_id, priority_class, window_id = name.decode().removeprefix(prefix).split(":", 2)
                held = cast(list[bytes | None], self._client.hmget(name, "open", "settled"))
                found[tenant_id, priority_class, window_id] = Window(*(int(value or 0) for value in held))
        return found

    def spent(self, windows: Sequence[tuple[str, str, str]]) -> list[Spent]:
        """Of these windows, by (tenant id, class, window id), in their order."""
        with bus_errors(), self._client.pipeline(transaction=False) as pipeline:
            for window in windows:
                pipeline.hmget(self._keys.money(*window), "settled", "open", "refused_ms")
            held = pipeline.execute()
        return [
            Spent(int(settled or 0), int(opened or 0), None if refused is None else int(refused))
            for settled, opened, refused in held
        ]

    def counted(self) -> list[EngineTotals]:
        """What every worker has published as used, by epoch: committed in one script with each Usage."""
        with bus_errors():
            names = sorted(cast(set[bytes], self._client.smembers(self._keys.workers)))
            held = [cast(dict[bytes, bytes], self._client.hgetall(self._keys.counted(name.decode()))) for name in names]
        return [total for name, counts in zip(names, held, strict=True) for total in _totals(name, counts)]

    def counted_and_waiting(self, most: int) -> tuple[list[EngineTotals], list[ToLedger | BadEntry] | None]:
        """``counted`` and the messages that the books have not acknowledged, oldest first, of one and the same moment.

        None in place of the messages where their entries are more than ``most``.
        """
        with bus_errors():
            names = sorted(cast(set[bytes], self._client.smembers(self._keys.workers)))
            with self._client.pipeline(transaction=True) as pipeline:
                for name in names:
                    pipeline.hgetall(self._keys.counted(name.decode()))
                pipeline.xrange(self._keys.usage, count=most + 1)
                *held, entries = pipeline.execute()
        totals = [total for name, counts in zip(names, held, strict=True) for total in _totals(name, counts)]
        if len(entries) > most:
            return totals, None
        waiting = [codec.decode(body[ENTRY_FIELD], entry_id.decode()) for entry_id, body in entries]
        return totals, [cast(ToLedger | BadEntry, message) for messages in waiting for message in messages]

    def tell_books(self, document: str) -> None:
        """What the last comparison of the books found, for /metrics."""
        with bus_errors():
            self._client.set(self._keys.books, document, ex=BOOKS_LIFETIME_S)

    def end(self, released: Released) -> None:
        """Gives back all that the response holds in Redis and tells the books so, in one script."""
        self._runner.run(self._bus.append_usage(released))


def _totals(name: bytes, held: Mapping[bytes, bytes]) -> Iterator[EngineTotals]:
    counts = {field.decode(): int(value) for field, value in held.items()}
    for epoch in sorted({int(field.split(":")[0]) for field in counts}):
        kinds = ("prompt", "output", "rework_prompt", "rework_output")
        yield EngineTotals(name.decode(), epoch, *(counts.get(f"{epoch}:{kind}", 0) for kind in kinds))
