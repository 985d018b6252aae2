"""A response as a thing with an id: made from a body, found again by any gateway, read as often as somebody asks.

Knows bodies, cards and events; refuses to know HTTP and websockets.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from gateway.admission import Denied, Limits
from gateway.asking import TIER_OF_CLASS, Ask, Chat
from gateway.auth import Caller
from gateway.door import Door, Entered, Keep
from gateway.errors import InvalidRequest, Reason, invalid
from gateway.response_stream import Reader, ResponseStream
from gateway.runtime import Runtime
from gateway.text import Text
from gateway.v1 import asks
from gateway.v1.decoding import refuse_unsupported
from gateway.v1.response_events import GRAMMAR_PARAM, NOT_FOUND, Event, Head, ResponseEvents, final_response
from gateway.v1.routes import Enter
from gateway.v1.schemas import ResponseCreate
from scheduler_engine.policy import PriorityClass

_PREFIX = "resp_"
_request_decoder = msgspec.json.Decoder(ResponseCreate)


@dataclass(frozen=True, slots=True)
class Reading:
    """One who reads a response from its first token on. Always: ``left`` ends it."""

    head: Head
    stream: ResponseStream
    reader: Reader
    limits: Limits
    is_elsewhere: bool = False  # at another gateway, which was not disturbed: only its end can be seen here

    async def events(self, starting_after: int = -1) -> AsyncIterator[list[Event]]:
        """As they come, up to the last. Events up to number ``starting_after`` are left out."""
        making = ResponseEvents(self.head, starting_after)
        yield making.begin()
        while True:
            delivery = await self.reader.next()
            yield making.take(delivery)
            if delivery.end is not None or self.reader.is_gone:
                return

    async def whole(self) -> Event | None:
        """The response as it ended; None when its client has gone."""
        making = ResponseEvents(self.head)
        while True:
            delivery = await self.reader.next()
            making.take(delivery)
            if delivery.end is not None:
                return final_response(self.head, delivery.end, making.shown)
            if self.reader.is_gone:
                return None

    def now(self) -> Event:
        """The response as it stands."""
        making, delivery = ResponseEvents(self.head), self.reader.so_far()
        making.take(delivery)
        if delivery.end is not None:
            return final_response(self.head, delivery.end, making.shown)
        if not delivery.pieces and not self.is_elsewhere:
            return self.head.response("queued")
        return self.head.response("in_progress", output=[self.head.item("in_progress", making.shown)])


async def create(
    runtime: Runtime,
    caller: Caller,
    request: ResponseCreate,
    *,
    source: str,
    received_at_s: float,
    is_return: bool = False,
    enter: Enter | None = None,
) -> Reading:
    """Lets it in, by ``enter`` or else by the door itself. Raises InvalidRequest."""
    if request.store and runtime.continuity.shelf is None:
        raise invalid(Reason.UNSUPPORTED_PARAMETER, "'store' is not supported here: there is no database.", "store")
    created_at = int(time.time())
    ask = replace(ask_of(request, runtime.door, source=source, received_at_s=received_at_s), is_return=is_return)
    keep = Keep(
        msgspec.json.encode(request),
        created_at,
        is_background=bool(request.background),
        is_stored=bool(request.store),
    )
    found = await (enter or runtime.door.enter)(caller, [ask], keep)
    if isinstance(found, Denied):
        raise InvalidRequest(found.refusal, found.limits.headers(), found.limits.priority_class)
    [entered] = found
    return Reading(_head_of_entered(request, entered, created_at), entered.stream, entered.reader, entered.limits)


def ask_of(request: ResponseCreate, door: Door, *, source: str, received_at_s: float) -> Ask:
    """Raises InvalidRequest."""
    refuse_unsupported(request)
    text = request.text
    if text is not None:
        refuse_unsupported(text, "text.")
    if request.stream_options is not None and not request.stream and request.type is None:
        raise invalid(Reason.INVALID_VALUE, "stream_options needs stream=true.", "stream_options")
    return asks.ask(
        request,
        model=request.model,
        prompt=Chat(asks.input_messages(request)),
        prompt_param="input",
        max_tokens=request.max_output_tokens,
        max_tokens_param="max_output_tokens",
        source=source,
        received_at_s=received_at_s,
        text=door.texts.get(request.model),
        grammar=asks.grammar_of_text(text.format if text is not None else None),
        grammar_param=GRAMMAR_PARAM,
    )


async def find(runtime: Runtime, caller: Caller, name: str, *, to_read: bool = True) -> Reading:
    """A response of the caller's tenant. Raises InvalidRequest: one of another tenant is not there.

    Not ``to_read``: whoever reads it at another gateway goes on doing so.
    """
    response_id = id_of(name)
    found = await runtime.continuity.find(caller.tenant_id, response_id, to_read=to_read)
    if found is None:
        raise InvalidRequest(NOT_FOUND)
    request = _request_decoder.decode(found.card.request)
    submit = found.card.submit
    text = runtime.door.texts.get(submit.model)
    if text is None:  # another model is served now, and its tokens mean nothing here
        raise InvalidRequest(NOT_FOUND)
    head = _head(request, response_id, text, found.card.created_at, submit.max_tokens, submit.priority_class)
    return Reading(head, found.stream, found.stream.read(), found.stream.grant.limits, found.is_elsewhere)


@contextmanager
def reading(door: Door, found: Reading) -> Iterator[Reading]:
    """Its reader leaves with the block; unless it is a background one, a response that nobody reads is cancelled."""
    try:
        yield found
    finally:
        door.stop_reading(found.stream, found.reader)


def id_of(name: str) -> str:
    """``resp_<uuid>``. Raises InvalidRequest: a name that cannot be is not there."""
    try:
        response_id = str(uuid.UUID(name.removeprefix(_PREFIX)))
    except ValueError:
        raise InvalidRequest(NOT_FOUND) from None
    if name != _PREFIX + response_id:
        raise InvalidRequest(NOT_FOUND)
    return response_id


def _head_of_entered(request: ResponseCreate, entered: Entered, created_at: int) -> Head:
    return _head(request, entered.response_id, entered.text, created_at, entered.max_tokens, entered.priority_class)


def _head(
    request: ResponseCreate,
    response_id: str,
    text: Text,
    created_at: int,
    max_tokens: int,
    priority_class: PriorityClass,
) -> Head:
    return Head(
        response_id=response_id,
        request=request,
        text=text,
        created_at=created_at,
        max_tokens=max_tokens,
        priority_class=priority_class,
        service_tier=TIER_OF_CLASS[priority_class],
    )
