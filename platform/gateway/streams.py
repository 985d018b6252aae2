"""From this gateway's outbox to the responses it serves: one reader, one small buffer per response.

Knows tokens and ends; refuses to know text and sockets. A buffer holds token ids, at most ``max_tokens`` of them, so a
reader that does not read costs little, and is dropped after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from gateway.admission import Grant
from gateway.errors import Reason, Refusal
from wire.bus import BadEntry
from wire.messages import Accepted, Finished, LoadSnapshot, Rejected, ToGateway, Tokens

log = logging.getLogger(__name__)

STALLED_AFTER_S = 30.0  # unread tokens this old: the reader is taken for gone
ABANDONED_LEASE_S = 10.0  # a cancelled response keeps its lease this long, also when its worker hangs
LOST_AFTER_S = 3.0  # a worker without a fresh snapshot


@dataclass(frozen=True, slots=True)
class Lost:
    """The response will not go on: its worker died, or nobody reads it."""

    refusal: Refusal


End = Finished | Rejected | Lost


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came since the last time. ``token_ids`` begin at the index where the last delivery ended."""

    token_ids: Sequence[int]
    end: End | None


@dataclass(slots=True, eq=False)
class ResponseStream:
    """One response as this gateway sees it. Always: tokens are handed out once, in order, and nothing after the end."""

    grant: Grant
    attempt: int
    worker_id: str
    epoch: int
    clock_s: Callable[[], float]
    reader: asyncio.Task[object] | None = None
    num_received: int = 0
    end: End | None = None
    abandoned_at_s: float | None = None
    _buffer: list[int] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _unread_since_s: float | None = None

    @property
    def response_id(self) -> str:
        return self.grant.response_id

    async def next(self) -> Delivery:
        """Wait for tokens or the end. Also returns, empty, once the response was abandoned."""
        await self._ready.wait()
        token_ids, self._buffer = self._buffer, []
        self._unread_since_s = None
        if self.end is None and self.abandoned_at_s is None:
            self._ready.clear()
        return Delivery(token_ids, self.end)

    def take(self, first_index: int, token_ids: Sequence[int]) -> None:
        """Tokens that were seen before (a worker that repeats itself) are dropped."""
        if self.end is not None:
            return
        new = token_ids[max(0, self.num_received - first_index) :]
        if not new:
            return
        self.num_received += len(new)
        self._buffer.extend(new)
        if self._unread_since_s is None:
            self._unread_since_s = self.clock_s()
        self._ready.set()

    def finish(self, end: End) -> None:
        if self.end is None:
            self.end = end
            if self._unread_since_s is None:
                self._unread_since_s = self.clock_s()
            self._ready.set()

    def abandon(self) -> None:
        """The client has gone: wake whoever waits."""
        if self.abandoned_at_s is None:
            self.abandoned_at_s = self.clock_s()
            self._ready.set()

    @property
    def is_stalled(self) -> bool:
        return self._unread_since_s is not None and self.clock_s() - self._unread_since_s > STALLED_AFTER_S

    @property
    def holds_lease(self) -> bool:
        """A slot is never kept for long by a worker that does not answer the cancel."""
        return self.abandoned_at_s is None or self.clock_s() - self.abandoned_at_s < ABANDONED_LEASE_S


class Streams:
    """Every response of this gateway that has not ended.

    Always: a message of an older attempt or of an unknown response changes nothing. A response that its client has
    left stays here until its end, so that a worker that dies meanwhile does not leave its reservation open.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._streams: dict[str, ResponseStream] = {}
        self._seen_at_s: dict[str, float] = {}
        self.num_bad_entries = 0

    def open(self, grant: Grant, worker_id: str, epoch: int, attempt: int = 1) -> ResponseStream:
        """The task that calls is the one that reads, and is cancelled when it does not."""
        stream = ResponseStream(grant, attempt, worker_id, epoch, self._clock_s, asyncio.current_task())
        self._streams[grant.response_id] = stream
        self._seen_at_s.setdefault(worker_id, self._clock_s())
        return stream

    def leave(self, stream: ResponseStream) -> bool:
        """Its reader is done with it. True when the response goes on and has to be cancelled."""
        stream.reader = None
        if stream.end is not None:
            self._streams.pop(stream.response_id, None)
            return False
        stream.abandon()
        return True

    def forget(self, stream: ResponseStream) -> None:
        """It never reached a worker."""
        self._streams.pop(stream.response_id, None)

    def __iter__(self) -> Iterator[ResponseStream]:
        return iter(tuple(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)

    def deliver(self, messages: Iterable[ToGateway | BadEntry]) -> None:
        """One batch from the outbox. No reader wakes before the whole batch is in, so an end meets its last tokens."""
        for message in messages:
            match message:
                case Tokens():
                    self._deliver_tokens(message)
                case Finished() | Rejected():
                    stream = self._streams.get(message.response_id)
                    if stream is not None and stream.attempt == message.attempt:
                        self._finish(stream, message)
                case Accepted():
                    pass
                case BadEntry():
                    self.num_bad_entries += 1
                    log.error("an outbox entry was not understood: %s", message.reason)
                case _:
                    assert_never(message)

    def _deliver_tokens(self, tokens: Tokens) -> None:
        columns = (tokens.response_ids, tokens.attempts, tokens.choices, tokens.first_indexes, tokens.token_ids)
        for response_id, attempt, choice, first_index, token_ids in zip(*columns, strict=True):
            stream = self._streams.get(response_id)
            if stream is not None and stream.attempt == attempt and choice == 0:
                stream.take(first_index, token_ids)

    def _finish(self, stream: ResponseStream, end: End) -> None:
        stream.finish(end)
        if stream.reader is None:
            self._streams.pop(stream.response_id, None)

    def lost_workers(self, loads: Iterable[LoadSnapshot]) -> list[tuple[str, int]]:
        """(worker, epoch) with open responses that are dead by these snapshots: another epoch, or silent for long."""
        now_s = self._clock_s()
        epochs = {load.worker_id: load.epoch for load in loads}
        self._seen_at_s.update(dict.fromkeys(epochs, now_s))
        serving = dict.fromkeys((stream.worker_id, stream.epoch) for stream in self if stream.end is None)
        return [
            (worker_id, epoch)
            for worker_id, epoch in serving
            if epochs.get(worker_id, epoch) != epoch or now_s - self._seen_at_s[worker_id] > LOST_AFTER_S
        ]

    def pardon(self) -> None:
        """Snapshots could not be read: nobody's silence counts."""
        self._seen_at_s = dict.fromkeys(self._seen_at_s, self._clock_s())

    def lose(self, worker_id: str, epoch: int) -> list[ResponseStream]:
        """End every open response of a dead worker; returns those it ended."""
        refusal = Refusal(reason=Reason.WORKER_LOST, message="The worker that served this response was lost.")
        lost = [s for s in self if (s.worker_id, s.epoch) == (worker_id, epoch) and s.end is None]
        for stream in lost:
            self._finish(stream, Lost(refusal))
        return lost
