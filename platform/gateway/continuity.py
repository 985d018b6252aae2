"""Responses that outlive a worker or a gateway: sent to another worker, taken over by another gateway, shown again.

Knows attempts and owners; refuses to know limits and texts. The rules are in docs/decisions/0010.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from gateway import dispatch
from gateway.admission import Grant, Limits
from gateway.errors import InvalidRequest, Reason, Refusal
from gateway.ownership import MOVED_MS, Card, Owner, Ownership
from gateway.response_stream import Lost, ResponseStream
from gateway.stored.shelf import ResponseShelf
from gateway.streams import MOVED, NOWHERE, Streams
from wire.bus import FinishedOutput, GatewayBus
from wire.messages import Attach, Finished, LoadSnapshot, Moved, Submit

log = logging.getLogger(__name__)

ELSEWHERE_S = 0.05  # how often the end of a response at another gateway is looked for
HOMELESS_S = 30.0  # how long a response waits for a worker to go on with it


@dataclass(frozen=True, slots=True)
class Found:
    """A response by its id. Always: the card's tenant asked for it.

    ``is_elsewhere``: it goes on at a living gateway that was not disturbed, and nothing of it is known here.
    """

    stream: ResponseStream
    card: Card
    is_elsewhere: bool = False


class Continuity:
    """Always: a response goes on under one attempt, owned by one gateway; whoever comes second is told so."""

    def __init__(
        self,
        *,
        bus: GatewayBus,
        streams: Streams,
        ownership: Ownership,
        loads: Callable[[], Sequence[LoadSnapshot]],
        take_back: Callable[[ResponseStream, str], Awaitable[None]],
        shelf: ResponseShelf | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._ownership = ownership
        self._loads = loads
        self._take_back = take_back
        self.shelf = shelf
        self._clock_s = clock_s

    async def worker_died(self, worker_id: str, epoch: int) -> None:
        """Nothing of that epoch can come any more, and all that came has been delivered."""
        orphans = self._streams.orphan(worker_id, epoch)
        if orphans:
            log.error("worker %s (epoch %s) was lost with %s responses", worker_id, epoch, len(orphans))
        await self.go_on()

    async def go_on(self) -> None:
        """Find a worker for every response that has none; give up those that have waited too long. Raises BusError."""
        for stream in self._streams:
            if stream.awaits_attach and stream.end is None:
                await self._end_from_output(stream)
        for stream in self._streams.homeless():
            if stream.is_unsent:
                await self._send(stream)
            elif self._is_hopeless(stream):
                await self._give_up(stream)
            else:
                await self._find_worker(stream)

    def _is_hopeless(self, stream: ResponseStream) -> bool:
        """Nobody reads it, or no worker came for long, or its reader had something that is not known here.

        One in the background is begun anew instead: it draws the same tokens again.
        """
        if stream.abandoned_at_s is not None or (stream.awaits_attach and not stream.outlives_readers):
            return True
        return stream.homeless_since_s is not None and self._clock_s() - stream.homeless_since_s > HOMELESS_S

    async def _give_up(self, stream: ResponseStream) -> None:
        """What is another's by now, since we slept, is not ours to end."""
        owner = await self._ownership.owner(stream.response_id)
        if owner is not None and owner.is_open and owner.gateway_id not in (self._bus.gateway_id, ""):
            self._streams.let_go(stream, Lost(MOVED))
            return
        self._streams.lose(stream)
        await self._take_back(stream, "worker_lost")

    async def _find_worker(self, stream: ResponseStream) -> None:
        submit = stream.submit
        choice = dispatch.choose(self._loads(), submit.model, submit.priority_class, also_closed=True)
        if isinstance(choice, Refusal):
            return
        me, worker = self._bus.gateway_id, (choice.worker_id, choice.epoch)
        owner = await self._ownership.owner(stream.response_id)
        if owner is None or owner.gateway_id != me:
            self._streams.let_go(stream, Lost(MOVED))
            return
        attempt = owner.attempt + 1  # its own may have been moved on by a call whose answer was lost
        if not await self._ownership.move(stream.response_id, owner, gateway_id=me, attempt=attempt, worker=worker):
            self._streams.let_go(stream, Lost(MOVED))
            return
        stream.submit = replace(next_attempt(stream, attempt, me), worker_epoch=choice.epoch)
        self._streams.settle(stream, choice.worker_id, choice.epoch, attempt)
        await self._send(stream)

    async def _send(self, stream: ResponseStream) -> None:
        """Tried again until it arrives: the worker takes the same attempt once."""
        await self._bus.send(stream.worker_id, stream.submit)
        stream.is_unsent = False
        log.warning("response %s goes on at worker %s, attempt %s", *_names(stream))

    async def find(self, tenant_id: str, response_id: str, *, to_read: bool = True) -> Found | None:
        """A response of this tenant: one of ours, a finished one, or another gateway's, which is then ours.

        Not ``to_read``: a living gateway keeps it. Raises InvalidRequest where it was taken from one just now.
        """
        card = await self._ownership.card(tenant_id, response_id)
        if card is None:
            return await self._stored(tenant_id, response_id)
        stream = self._streams.get(response_id) or await self._finished(card)
        if stream is None:
            owner = await self._ownership.owner(response_id)
            if owner is None:
                return None
            if owner.is_open and await self._ownership.is_alive(owner.gateway_id):
                if not to_read:
                    return Found(_elsewhere(card, owner, self._clock_s), card, is_elsewhere=True)
                if not await self._ownership.may_take(response_id):
                    raise InvalidRequest(replace(MOVED, retry_after_us=MOVED_MS * 1_000))
            stream = await self._take_over(card, owner) if owner.is_open else None
            stream = stream or await self._finished(card) or _ended_without_output(card, owner, self._clock_s)
        return Found(stream, card)

    async def _stored(self, tenant_id: str, response_id: str) -> Found | None:
        stored = None if self.shelf is None else await self.shelf.take_down(tenant_id, response_id)
        if stored is None:
            return None
        stream = _unowned(stored.card, self._clock_s)
        _fill(stream, stored.output)
        return Found(stream, stored.card)

    async def store_ended(self) -> None:
        """What has ended since the last time, and was to be kept, onto the durable shelf. Raises ShelfDown."""
        while self._streams.to_store:
            await self._store(self._streams.to_store[0])
            self._streams.to_store.pop(0)

    async def _store(self, stream: ResponseStream) -> None:
        """What failed is not kept."""
        card, end = stream.card, stream.end
        if self.shelf is not None and card is not None and card.is_stored and isinstance(end, Finished):
            output = FinishedOutput(end, [choice.token_ids for choice in stream.choices])
            await self.shelf.put(card, output)

    async def forget(self, tenant_id: str, response_id: str) -> None:
        """Nobody can show it any more."""
        await self._ownership.forget(tenant_id, response_id)
        if self.shelf is not None:
            await self.shelf.throw_away(tenant_id, response_id)

    async def _finished(self, card: Card) -> ResponseStream | None:
        output = await self._bus.output(card.submit.response_id)
        if output is None:
            return None
        stream = _unowned(card, self._clock_s)
        _fill(stream, output)
        await self._store(stream)  # its gateway may have died before it could
        return stream

    async def _take_over(self, card: Card, owner: Owner) -> ResponseStream | None:
        response_id, me = card.submit.response_id, self._bus.gateway_id
        worker = (owner.worker_id, owner.epoch)
        if not await self._ownership.move(response_id, owner, gateway_id=me, attempt=owner.attempt, worker=worker):
            return None
        grant = Grant(response_id, card.tenant_id, owner.lease_key, Limits(card.submit.priority_class))
        submit = replace(card.submit, attempt=owner.attempt, gateway_id=me)
        stream = self._streams.open(grant, submit, *worker, outlives_readers=card.is_background)
        stream.linger()
        stream.awaits_attach, stream.card, stream.key_public_id = True, card, card.key_public_id
        attach = Attach(response_id=response_id, attempt=owner.attempt, gateway_id=me, from_index=0)
        await self._bus.send(owner.worker_id, attach)
        if await self._ownership.is_alive(owner.gateway_id):
            await self._bus.tell_gateway(owner.gateway_id, Moved(response_id=response_id, gateway_id=me))
        log.warning("response %s was taken over from %s", response_id, owner.gateway_id)
        return stream

    async def _end_from_output(self, stream: ResponseStream) -> None:
        """It may have ended before the worker heard of us."""
        output = await self._bus.output(stream.response_id)
        if output is not None and stream.awaits_attach:
            take_all(stream, output)
            self._streams.finish(stream, output.finished)

    async def until_ended(self, stream: ResponseStream) -> None:
        """For a response that is elsewhere: until its end is published. Raises BusError."""
        while stream.end is None:
            output = await self._bus.output(stream.response_id)
            if output is not None:
                _fill(stream, output)
                return
            await asyncio.sleep(ELSEWHERE_S)

    async def adopt(self) -> None:
        """Take over what goes on without a reader and whose gateway is gone. Raises BusError."""
        response_ids = await self._ownership.in_background()
        if not response_ids:
            return
        ended = []
        for response_id, owner in zip(response_ids, await self._ownership.owners(response_ids), strict=True):
            if owner is None or not owner.is_open:
                ended.append(response_id)
            elif owner.gateway_id != self._bus.gateway_id and not await self._ownership.is_alive(owner.gateway_id):
                card = await self._ownership.card(owner.tenant_id, response_id)
                if card is not None and self._streams.get(response_id) is None:
                    await self._take_over(card, owner)
        await self._ownership.not_in_background(ended)


def next_attempt(stream: ResponseStream, attempt: int, gateway_id: str) -> Submit:
    """The Submit that goes on where the last one stopped: what was delivered is history, and nothing sheds it now.

    Nor one that may have begun before it was taken over: it starts at its first token. Of one that had not begun, the
    time that has passed is taken off its durations.
    """
    first = stream.first_submit
    submit = replace(first, attempt=attempt, gateway_id=gateway_id, ended_choices=stream.ended_choices)
    if stream.has_started or stream.awaits_attach:
        delivered = tuple(tuple(choice.token_ids) for choice in stream.choices)
        return replace(
            submit,
            delivered_token_ids=delivered,
            remaining_first_token_us=None,
            remaining_hard_deadline_us=None,
            max_queue_wait_us=None,
        )
    age_us = stream.age_us
    return replace(
        submit,
        remaining_first_token_us=_less(first.remaining_first_token_us, age_us),
        remaining_hard_deadline_us=_less(first.remaining_hard_deadline_us, age_us),
        remaining_completion_us=_less(first.remaining_completion_us, age_us),
        max_queue_wait_us=_less(first.max_queue_wait_us, age_us),
    )


def _less(duration_us: int | None, passed_us: int) -> int | None:
    return None if duration_us is None else max(1, duration_us - passed_us)


def take_all(stream: ResponseStream, output: FinishedOutput) -> None:
    """What has not come yet of the tokens; the end is for whoever owns the stream to tell."""
    for index, token_ids in enumerate(output.token_ids):
        stream.take(index, 0, token_ids)


def _fill(stream: ResponseStream, output: FinishedOutput) -> None:
    take_all(stream, output)
    stream.finish(output.finished)


def _elsewhere(card: Card, owner: Owner, clock_s: Callable[[], float]) -> ResponseStream:
    """To be cancelled by, or waited for; its readers' leaving means nothing to it."""
    stream = _unowned(card, clock_s)
    stream.worker_id, stream.epoch, stream.attempt = owner.worker_id, owner.epoch, owner.attempt
    stream.outlives_readers = True
    return stream


def _unowned(card: Card, clock_s: Callable[[], float]) -> ResponseStream:
    """A response that is only shown: it is in nobody's books any more."""
    grant = Grant(card.submit.response_id, card.tenant_id, "", Limits(card.submit.priority_class))
    stream = ResponseStream(grant, card.submit, NOWHERE, clock_s)
    stream.card = card
    return stream


_WHY = {
    "shed": Refusal(reason=Reason.OVERLOADED, message="The request was refused before its first token; it was free."),
    "cancelled_admin": Refusal(reason=Reason.CANCELLED, message="The response was cancelled."),
}
_FAILED = Refusal(reason=Reason.WORKER_LOST, message="The response was lost with the worker that served it.")


def _ended_without_output(card: Card, owner: Owner, clock_s: Callable[[], float]) -> ResponseStream:
    stream = _unowned(card, clock_s)
    stream.finish(lost_by(owner))
    return stream


def lost_by(owner: Owner) -> Lost:
    """The end of a response that has ended and left no output."""
    return Lost(_WHY.get(owner.terminal, _FAILED))


def _names(stream: ResponseStream) -> tuple[str, str, int]:
    return stream.response_id, stream.worker_id, stream.attempt
