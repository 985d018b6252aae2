"""The one way in: every door (HTTP, websocket, batch line, playground) asks here, and nowhere else.

Knows the order of the questions: model, class, worker, prompt, limits, dispatch. Refuses to know bodies and sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway import metrics
from gateway.admission import Admission, Denied, Limits
from gateway.asking import TIER_OF_CLASS, Ask, requested_class
from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.offers import Offer, Offers, Terms, terms_of
from gateway.owed import Owed
from gateway.ownership import Card, Ownership
from gateway.policy_feed import PolicyFeed
from gateway.response_stream import Lost, Reader, ResponseStream
from gateway.streams import Streams
from gateway.text import Text
from gateway.tracing import tracing
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError, BusFull, GatewayBus
from wire.messages import Cancel, LoadSnapshot, Released

log = logging.getLogger(__name__)
_KEY_GONE = Refusal(reason=Reason.INVALID_KEY, message="The API key was revoked.")
# By a policy that is older than the one in force, these would send away for good who is welcome by now.
_FINAL_BY_POLICY = frozenset(
    (Reason.MODEL_NOT_FOUND, Reason.CLASS_NOT_ALLOWED, Reason.INVALID_VALUE, Reason.NEVER_WITHIN_LIMIT, Reason.MONEY)
)
_GOING = Refusal(reason=Reason.OVERLOADED, message="This gateway is going away; please send the request again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A response on its way, and one who reads it. Always: ``leave`` is called with it exactly once."""

    stream: ResponseStream
    reader: Reader
    text: Text
    limits: Limits
    priority_class: PriorityClass
    prompt_tokens: int
    max_tokens: int
    num_cache_tokens: int = 0  # what the worker's device holds, where it says so

    @property
    def response_id(self) -> str:
        return self.stream.response_id

    @property
    def service_tier(self) -> str:
        return TIER_OF_CLASS[self.priority_class]


@dataclass(frozen=True, slots=True)
class Keep:
    """That a response shall be found again by its id: the body as it came, and what becomes of it without a reader."""

    request: bytes
    created_at: int
    is_background: bool = False
    is_stored: bool = False


class Door:
    """Always: whoever was let in holds one lease and one reservation, and both end exactly once, on the Bus."""

    def __init__(
        self,
        *,
        bus: GatewayBus,
        admission: Admission,
        streams: Streams,
        ownership: Ownership,
        texts: Mapping[str, Text],
        policy: PolicyFeed,
        loads: Callable[[], Sequence[LoadSnapshot]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._admission = admission
        self._streams = streams
        self._ownership = ownership
        self._policy = policy
        self._background: set[asyncio.Task[None]] = set()
        self._taking: set[asyncio.Task[list[ResponseStream] | Denied]] = set()
        self._closed = asyncio.Event()
        self.owed = Owed(bus, ownership, self._is_served, clock_s)
        self.texts = texts
        self._offers = Offers(texts, loads, bus.gateway_id, admission.now_ms, clock_s)

    def models_of(self, caller: Caller) -> list[tuple[Text, list[str]]]:
        """The models of this caller's tenant, each with the service tiers granted: none while all are paused."""
        view = self._policy.view
        if view is None:
            return []
        found = []
        for text in self.texts.values():
            theirs = [c for c in view.classes_of(caller.tenant_id) if (text.model, c) in view.prices]
            if theirs:
                found.append((text, [TIER_OF_CLASS[c] for c in theirs if view.quota(caller.tenant_id, c)]))
        return found

    async def enter(
        self,
        caller: Caller,
        asks: Sequence[Ask],
        keep: Keep | None = None,
        *,
        if_stopped: str = "client",
        only: PriorityClass | None = None,
    ) -> list[Entered] | Denied:
        """All responses of one request, which differ in their prompts; ``keep`` is for one alone. Checks everything,
        takes the limits, sends the Submits. A refusal costs nothing and leaves nothing behind. ``only``: the one class
        that may serve them, since it served others of the same request.
        The policy was in force a second ago at most; where it makes a refusal a final one, it is in force by now.
        Raises BusError where that cannot be read.

        Cancelled half way, they leave again, for the reason ``if_stopped``, whatever was taken by then.
        """
        await self._policy.confirm()
        found = await self._enter(caller, asks, keep, if_stopped, only)
        if not isinstance(found, Denied) or found.refusal.reason not in _FINAL_BY_POLICY:
            return found
        is_outdated = await self._policy.catch_up()
        return await self._enter(caller, asks, keep, if_stopped, only) if is_outdated else found

    async def _enter(
        self, caller: Caller, asks: Sequence[Ask], keep: Keep | None, if_stopped: str, only: PriorityClass | None
    ) -> list[Entered] | Denied:
        ask = asks[0]
        if self._closed.is_set():
            return Denied(_GOING, Limits(requested_class(caller, ask)))
        terms = self._terms(caller, ask, only)
        if isinstance(terms, Refusal):
            return Denied(terms, Limits(requested_class(caller, ask)))
        unlimited = Limits(terms[0].priority_class)
        bundles = await self._offers.bundles(caller, asks, terms, is_kept=keep is not None)
        if isinstance(bundles, Refusal):
            return Denied(bundles, unlimited)
        watched_key = "" if ask.source == "batch" else caller.public_id  # a batch sees to its key itself
        streams = await self._unstopped(self._take(bundles, keep, watched_key), if_stopped)
        if isinstance(streams, Denied):
            return streams
        num_cache_tokens = next(one[0].num_cache_tokens for one in bundles if one[0].submit is streams[0].submit)
        return [self._entered(stream, num_cache_tokens) for stream in streams]

    def _entered(self, stream: ResponseStream, num_cache_tokens: int) -> Entered:
        served = stream.submit
        if served.requested_class is not None:
            metrics.count_downgrade(served.requested_class, served.priority_class)
        return Entered(
            stream=stream,
            reader=stream.read(),
            text=self.texts[served.model],
            limits=stream.grant.limits,
            priority_class=served.priority_class,
            prompt_tokens=len(served.prompt_token_ids),
            max_tokens=served.max_tokens,
            num_cache_tokens=num_cache_tokens,
        )

    async def _unstopped(
        self, work: Coroutine[Any, Any, list[ResponseStream] | Denied], if_stopped: str
    ) -> list[ResponseStream] | Denied:
        """Whoever is stopped from here on has perhaps been let in: the taking goes to its end, and is then undone."""

        def undo(taking: asyncio.Task[list[ResponseStream] | Denied]) -> None:
            found = None if taking.cancelled() or taking.exception() is not None else taking.result()
            for stream in found if isinstance(found, list) else ():
                if stream.end is None:
                    stream.abandon()
                    self._in_background(self._cancel(stream, if_stopped))

        taking = asyncio.create_task(work)
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(undo)
            raise

    async def _take(
        self, bundles: Sequence[Sequence[Offer]], keep: Keep | None, watched_key: str
    ) -> list[ResponseStream] | Denied:
        """The limits, and then a worker. Always: with a refusal nothing of either is held."""
        first = bundles[0]
        tracing.say(gen_ai__request__model=first[0].wish.model, gen_ai__request__max_tokens=first[0].submit.max_tokens)
        for one in first:
            self.owed.forget(one.wish.response_id)
        with tracing.part("admission"):
            grants = await self._admission.admit(*([one.wish for one in bundle] for bundle in bundles))
        if isinstance(grants, Denied):
            for one in first if grants.is_unsure else ():
                self.owed.note(one.wish.response_id, one.wish.tenant_id, "not_dispatched")
            return grants
        served_in = grants[0].limits.priority_class
        taken = next(bundle for bundle in bundles if bundle[0].priority_class is served_in)
        outlives_readers = keep is not None and keep.is_background
        streams = []
        for grant, one in zip(grants, taken, strict=True):
            worker = one.wish.worker_id, one.wish.epoch
            stream = self._streams.open(grant, one.submit, *worker, outlives_readers=outlives_readers)
            stream.key_public_id = watched_key
            streams.append(stream)
        refusal = await self._dispatch(streams, keep)
        if refusal is not None:
            return Denied(refusal, Limits(served_in))
        for stream in streams if self._closed.is_set() else ():  # meanwhile
            self._end(stream, _GOING, "gateway_lost")
        return streams

    def leave(self, entered: Entered) -> None:
        """The reader is done. A response that still goes on is cancelled: the worker frees its row at the next step."""
        self.stop_reading(entered.stream, entered.reader)

    def stop_reading(self, stream: ResponseStream, reader: Reader, reason: str = "client") -> None:
        if self._streams.leave(stream, reader):
            self._in_background(self._cancel(stream, reason))

    def cancel(self, stream: ResponseStream, reason: str = "client") -> None:
        """The client takes it back and may go on reading: the end comes as Finished."""
        self._in_background(self._cancel(stream, reason))

    async def take_back(self, stream: ResponseStream, reason: str) -> None:
        """End a reservation that no worker will end. Raises BusError.

        The Submit may stand in an inbox all the same (the next epoch's, or after a time-out): it is cancelled.
        """
        released = Released(response_id=stream.response_id, tenant_id=stream.grant.tenant_id, reason=reason)
        try:
            await self._bus.append_usage(released)
        except BusError:
            self.owed.note(stream.response_id, stream.grant.tenant_id, reason)
            raise
        await self._send_cancel(stream, "gateway_lost")

    async def close(self) -> None:
        """This gateway goes: let nobody in, end and cancel what it still serves, and let every message out."""
        self._closed.set()
        if self._taking:
            await asyncio.shield(asyncio.wait(self._taking))
        for stream in self._streams:
            if not stream.outlives_readers:  # another gateway goes on with those
                self._end(stream, _GOING, "gateway_lost")
        await asyncio.shield(asyncio.gather(*self._background))

    def end_forgotten(self) -> None:
        """Nobody came again for what was taken over."""
        for stream in self._streams:
            if stream.is_forgotten:
                stream.abandon()
                self._in_background(self._cancel(stream, "client"))

    async def end_closed_keys(self, is_open: Callable[[str], Awaitable[bool]]) -> None:
        """What a key asked for ends with it, also in the background."""
        for key in sorted({stream.key_public_id for stream in self._streams if stream.end is None} - {""}):
            if not await is_open(key):
                for stream in self._streams:
                    if stream.key_public_id == key:
                        self._end(stream, _KEY_GONE, "admin")

    def _end(self, stream: ResponseStream, why: Refusal, reason: str) -> None:
        if stream.end is None and stream.abandoned_at_s is None:
            self._in_background(self._cancel(stream, reason))
            stream.abandon()
            if stream.readers or not stream.outlives_readers:  # else its end comes from the worker
                stream.finish(Lost(why))

    def _is_served(self, response_id: str) -> bool:
        stream = self._streams.get(response_id)
        return stream is not None and stream.end is None

    def _terms(self, caller: Caller, ask: Ask, only: PriorityClass | None) -> Sequence[Terms] | Refusal:
        view = self._policy.view
        if view is None:
            return Refusal(reason=Reason.UNAVAILABLE, message="No policy has been published yet.")
        if not any(text.model == ask.model for text, _ in self.models_of(caller)):
            message = f"The model {ask.model!r} does not exist or you do not have access to it."
            return Refusal(reason=Reason.MODEL_NOT_FOUND, message=message, param="model")
        return terms_of(view, caller, ask, only)

    async def _dispatch(self, streams: Sequence[ResponseStream], keep: Keep | None) -> Refusal | None:
        """All of them to one worker, in one message: none runs where another was not handed over."""
        try:
            if keep is not None:
                [kept] = streams
                kept.card = _card(kept, keep)
                await self._ownership.keep(kept.card)
            await self._bus.send(streams[0].worker_id, *(stream.submit for stream in streams))
            return None
        except BusError as error:
            for stream in streams:
                self._streams.forget(stream)
                self._in_background(self.take_back(stream, "not_dispatched"))
            kind = Reason.OVERLOADED if isinstance(error, BusFull) else Reason.UNAVAILABLE
            return Refusal(reason=kind, message="The request could not be handed to a worker; nothing was charged.")

    async def _cancel(self, stream: ResponseStream, reason: str) -> None:
        if stream.homeless_since_s is None:
            await self._send_cancel(stream, reason)
        else:
            self._streams.lose(stream)
            await self.take_back(stream, "worker_lost")

    async def _send_cancel(self, stream: ResponseStream, reason: str) -> None:
        if stream.worker_id:
            cancel = Cancel(response_id=stream.response_id, attempt=stream.attempt, reason=reason)
            await self._bus.send(stream.worker_id, cancel)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """So that a reader that is being torn down need not wait. A failure leaves the lease to expire by itself."""

        async def guarded() -> None:
            try:
                await work
            except BusError as error:
                log.warning("a cancel or release was not sent: %s", error)

        task = asyncio.create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _card(stream: ResponseStream, keep: Keep) -> Card:
    return Card(
        tenant_id=stream.grant.tenant_id,
        created_at=keep.created_at,
        request=keep.request,
        submit=stream.submit,
        is_background=keep.is_background,
        is_stored=keep.is_stored,
        key_public_id=stream.key_public_id,
    )
