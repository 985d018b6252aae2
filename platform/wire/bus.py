"""The Bus: the one door between gateways, workers and the settler, as protocols.

Two implementations stand under one set of promises (tests/wire): ``memory_bus`` and ``redis_bus``.
Promises: an entry is delivered in order and at least once to its reader; nothing is lost in silence (a full stream
raises BusFull); a fenced worker cannot publish; unknown or newer messages arrive as ``BadEntry``, never as an
exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wire.messages import Finished, LoadSnapshot, ToGateway, ToLedger, ToWorker, Usage


class BusError(Exception):
    """The Bus cannot be reached or refuses; the caller fails closed."""


class BusFull(BusError):
    """A stream stands at its hard length: overload, to be answered 503.

    ``gateway_id`` names the reader that does not read, when it is a gateway's outbox that is full.
    """

    def __init__(self, message: str, gateway_id: str | None = None) -> None:
        super().__init__(message)
        self.gateway_id = gateway_id


class Fenced(BusError):
    """This worker's epoch was declared dead: drop everything and start again under a new one."""


@dataclass(frozen=True, slots=True)
class BadEntry:
    """An entry that could not be understood: kept as an error, counted, and skipped."""

    entry_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """All that it takes to show a finished response again: its end, and the whole token ids of each choice."""

    finished: Finished
    token_ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All a worker says after one step; published in one atomic call after the epoch check.

    ``outputs`` are kept for 10 minutes, so that any gateway can show a finished response again.
    """

    to_gateways: Mapping[str, Sequence[ToGateway]] = field(default_factory=dict)
    usages: Sequence[Usage] = ()
    outputs: Mapping[str, FinishedOutput] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.to_gateways or self.usages or self.outputs)


class WorkerBus(Protocol):
    """Synchronous: ``receive`` and ``publish_load`` belong to the worker's I/O thread, ``publish`` to its sender."""

    worker_id: str

    def open(self) -> int:
        """Take a new epoch, fencing any older one of this worker_id, and empty the inbox of work sent to it."""
        ...

    def receive(self, timeout_s: float) -> Sequence[ToWorker | BadEntry]:
        """Wait up to ``timeout_s`` for input; entries are trimmed once returned. A new policy arrives as PolicyChanged,
        and before any Submit that was made under it.

        Raises Fenced or BusError.
        """
        ...

    def publish(self, output: StepOutput) -> None:
        """All or nothing. Raises Fenced or BusFull (nothing of ``output`` is visible) or BusError (all of it may be).

        The very same ``output`` may be published again after a BusError: it is not seen twice.
        """
        ...

    def publish_load(self, load: LoadSnapshot) -> None:
        """Also the worker's heartbeat. Raises Fenced."""
        ...

    def live_gateways(self) -> frozenset[str]:
        """Gateways whose heartbeat is fresh (9 s); work of others is cancelled with reason gateway_lost."""
        ...

    def close(self) -> None: ...


class GatewayBus(Protocol):
    """Asynchronous, one per gateway process."""

    gateway_id: str

    async def open(self) -> None: ...

    async def send(self, worker_id: str, *messages: ToWorker) -> None:
        """All of them or none. Raises BusFull or BusError; they then did not arrive."""
        ...

    async def receive(self, timeout_s: float) -> Sequence[ToGateway | BadEntry]: ...

    async def loads(self) -> Sequence[LoadSnapshot]:
        """The newest snapshot of every worker whose heartbeat is fresh (2 s)."""
        ...

    async def output(self, response_id: str) -> FinishedOutput | None:
        """A finished response, for 10 minutes; None when unknown."""
        ...

    async def tell_gateway(self, gateway_id: str, message: ToGateway) -> None:
        """One gateway's word to another. Raises BusFull or BusError."""
        ...

    async def append_usage(self, message: ToLedger) -> None:
        """Append to the durable usage stream outside an admit script. A Released also ends the response's record."""
        ...

    async def fence(self, worker_id: str, epoch: int) -> bool:
        """Declare this epoch of a worker dead. False when it has already gone on to another one."""
        ...

    async def heartbeat(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class UsageEntry:
    entry_id: str
    message: ToLedger | BadEntry


class UsageReader(Protocol):
    """The settler's side of the durable usage stream: one consumer group, acknowledged after commit."""

    def read(self, count: int, timeout_s: float) -> Sequence[UsageEntry]:
        """Entries read before and not acknowledged come first (again), then new ones."""
        ...

    def acknowledge(self, entry_ids: Sequence[str]) -> None: ...
