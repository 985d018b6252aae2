"""One request's responses from the door to the last byte: entered together, read together, streamed or whole.

Knows order, keep-alives and refusals; refuses to know shapes: an endpoint's ``Frames`` make the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from gateway import metrics
from gateway.admission import Denied, Limits
from gateway.asking import Ask
from gateway.auth import Caller
from gateway.door import Door, Entered
from gateway.errors import InvalidRequest, Refusal, error_event
from gateway.response_stream import Delivery, Piece
from gateway.tracing import tracing
from gateway.v1.answers import cost_headers, event, explained, outcome_of
from gateway.v1.http import Exchange
from gateway.v1.routes import Enter
from wire.messages import Finished

KEEPALIVE_S = 10.0  # a waiting stream begins after this long, then sends a comment as often: no proxy cuts it
KEEPALIVE = b": waiting\n\n"
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Frames(Protocol):
    """How an endpoint says things. ``number`` counts the responses of one request from 0."""

    def preamble(self) -> bytes:
        """Before the first token."""
        ...

    def piece(self, number: int, piece: Piece) -> bytes:
        """What came of one choice, streamed."""
        ...

    def tail(self, finished: Sequence[Finished]) -> bytes:
        """After the last choice has ended well."""
        ...

    def keep(self, number: int, piece: Piece) -> None:
        """What came of one choice, for ``whole``."""
        ...

    def whole(self, finished: Sequence[Finished]) -> bytes:
        """Everything that was kept, at once."""
        ...


@dataclass(slots=True)
class Group:
    """The responses of one request, in order. Always: all of them were let in together, and all leave."""

    door: Door
    entered: list[Entered]

    @property
    def limits(self) -> Limits:
        """As they stood after all of them."""
        return self.entered[0].limits

    def abandon(self) -> None:
        for one in self.entered:
            one.reader.abandon()

    @property
    def is_abandoned(self) -> bool:
        return any(one.reader.is_gone for one in self.entered)

    async def deliveries(self) -> AsyncIterator[tuple[int, Delivery] | None]:
        """As they come, until each has ended or the client has gone; None after a silence of KEEPALIVE_S."""
        waiting = {asyncio.ensure_future(one.reader.next()): n for n, one in enumerate(self.entered)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield None
                for future in sorted(done, key=waiting.__getitem__):
                    number, delivery = waiting.pop(future), future.result()
                    yield number, delivery
                    if delivery.end is None and not self.is_abandoned:
                        waiting[asyncio.ensure_future(self.entered[number].reader.next())] = number
        finally:
            for future in waiting:
                future.cancel()


async def _alone(entered: Entered) -> AsyncIterator[tuple[int, Delivery] | None]:
    """``Group.deliveries`` of one response, without a task for each delivery."""
    reader = entered.reader
    while True:
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                delivery = await reader.next()
        except TimeoutError:
            yield None
            continue
        yield 0, delivery
        if delivery.end is not None or reader.is_gone:
            return


@asynccontextmanager
async def entered(door: Door, enter: Enter, caller: Caller, asks: Sequence[Ask]) -> AsyncIterator[Group]:
    """All of them by ``enter``, or none at no charge. Raises InvalidRequest with the refusal, or BusError."""
    found = await enter(caller, asks)
    if isinstance(found, Denied):
        raise InvalidRequest(found.refusal, found.limits.headers(), found.limits.priority_class)
    try:
        yield Group(door, found)
    finally:
        for one in found:
            door.leave(one)


def _free(group: Group) -> None:
    """End the others at no charge: the request as a whole was refused."""
    for one in group.entered:
        if one.stream.end is None:
            group.door.cancel(one.stream, "sibling_refused")


async def answer_whole(group: Group, frames: Frames) -> tuple[bytes, Mapping[str, str]] | Refusal | None:
    """The body and its headers; None when the client has gone."""
    finished: dict[int, Finished] = {}
    async for delivered in _deliveries(group):
        if delivered is None:
            continue
        number, delivery = delivered
        for piece in delivery.pieces:
            frames.keep(number, piece)
        if delivery.end is not None:
            outcome = _outcome(group, number, delivery)
            if isinstance(outcome, Refusal):
                return outcome
            finished[number] = outcome
    if len(finished) < len(group.entered):
        return None
    ends = [finished[number] for number in range(len(finished))]
    return frames.whole(ends), {**group.limits.headers(), **cost_headers(ends[-1])}


async def respond(exchange: Exchange, group: Group, frames: Frames, *, stream: bool) -> None:
    exchange.priority_class = group.entered[0].priority_class
    async with exchange.watch_disconnect(group.abandon):
        if stream:
            with metrics.open_stream("sse"), tracing.part("stream"):
                await _EventStream(exchange, group, frames).run()
            return
        answer = await answer_whole(group, frames)
        if isinstance(answer, Refusal):
            await exchange.refuse(answer, group.limits.headers())
        elif answer is not None:
            await exchange.answer(200, *answer)


class _EventStream:
    """One SSE answer. Always: a refusal is an HTTP status before the first byte, and an error event after it."""

    def __init__(self, exchange: Exchange, group: Group, frames: Frames) -> None:
        self._exchange = exchange
        self._group = group
        self._frames = frames
        self._started = False

    async def run(self) -> None:
        finished: dict[int, Finished] = {}
        async for delivered in _deliveries(self._group):
            if delivered is None:
                await self._write(KEEPALIVE)
                continue
            number, delivery = delivered
            shown = b"".join([self._frames.piece(number, piece) for piece in delivery.pieces])
            if delivery.end is not None:
                outcome = _outcome(self._group, number, delivery)
                if isinstance(outcome, Refusal):
                    await self._refuse(outcome, shown)
                    return
                finished[number] = outcome
                if len(finished) == len(self._group.entered):
                    await self._end(shown, [finished[number] for number in range(len(finished))])
                    return
            if shown:
                await self._write(shown)

    async def _end(self, shown: bytes, finished: Sequence[Finished]) -> None:
        await self._exchange.end(await self._start() + shown + self._frames.tail(finished) + b"data: [DONE]\n\n")

    async def _write(self, events: bytes) -> None:
        await self._exchange.write(await self._start() + events)

    async def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        await self._exchange.start(200, {**EVENT_STREAM, **self._group.limits.headers()})
        return self._frames.preamble()

    async def _refuse(self, refusal: Refusal, shown: bytes) -> None:
        if not self._started and not shown:
            await self._exchange.refuse(refusal, self._group.limits.headers())
            return
        await self._exchange.break_off(await self._start() + shown + event(error_event(refusal)))


def _deliveries(group: Group) -> AsyncIterator[tuple[int, Delivery] | None]:
    return _alone(group.entered[0]) if len(group.entered) == 1 else group.deliveries()


def _outcome(group: Group, number: int, delivery: Delivery) -> Finished | Refusal:
    """A refusal of one ends the others too, at no charge."""
    one, end = group.entered[number], delivery.end
    assert end is not None
    if isinstance(end, Finished):
        tracing.finished(end)
    outcome = outcome_of(end, one.priority_class)
    if isinstance(outcome, Refusal):
        _free(group)
        return explained(outcome, end, one)
    return outcome
