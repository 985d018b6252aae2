"""The websocket /v1/responses: OpenAI's Responses protocol, which ``client.responses.connect()`` speaks.

Knows frames and lanes; refuses to know limits and workers. Tokens never ride a channel layer: this consumer has none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer

from gateway import metrics, runtime
from gateway.admission import Denied
from gateway.auth import Caller, key_of_request
from gateway.door import Entered
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.streams import End
from gateway.text import Detokenizer
from gateway.v1 import asks, schemas
from gateway.v1.chat import outcome_of, visible_bytes
from gateway.v1.decoding import decode, refuse_unsupported
from gateway.v1.response_events import NOT_FOUND, ResponseEvents, ends_in_good_order, error_frame
from wire.messages import Finished

BAD_KEY, SLOW_READER, OVERLOADED, GOING_AWAY = 4401, 4408, 1013, 1012
MAX_LANES = 16
MAX_QUEUED = 64  # responses that wait in one lane
KEY_CHECK_S = 5.0
LIFE_S = 3600.0

_Lane = asyncio.Queue[tuple[schemas.ResponseCreate, float]]


class _Kind(msgspec.Struct, frozen=True):
    """The part of any frame that says what it is."""

    type: str
    stream_id: Any = None


_kind_decoder = msgspec.json.Decoder(_Kind)
_create_decoder = msgspec.json.Decoder(schemas.ResponseCreate)
_cancel_decoder = msgspec.json.Decoder(schemas.ResponseCancel)


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # channels brings no types
    """One socket. Always: responses with the same ``stream_id`` run one after another, others side by side; when the
    socket closes, whatever still runs is cancelled.
    """

    channel_layer_alias = "none: tokens never ride a layer"

    async def connect(self) -> None:
        self._lanes: dict[str | None, tuple[_Lane, asyncio.Task[None]]] = {}
        self._running: dict[str, Entered] = {}
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        await self.accept()
        current = runtime.current()
        if current is None:
            await self.close(OVERLOADED)
            return
        self._runtime = current
        self._key = key_of_request(self.scope["headers"], self.scope["query_string"])
        caller = await self._authenticate()
        if isinstance(caller, Refusal):
            await self._refuse(caller)
            await self.close(BAD_KEY)
            return
        self._spawn(self._watch_key())
        self._spawn(self._leave_with_gateway())

    async def disconnect(self, code: int) -> None:
        tasks = [*self._tasks, *(task for _, task in self._lanes.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        frame = text_data.encode() if text_data is not None else bytes_data or b""
        stream_id = None
        try:
            if len(frame) > self._runtime.body_limit_bytes:
                raise invalid(
                    Reason.BODY_TOO_LARGE, f"A frame may have at most {self._runtime.body_limit_bytes} bytes."
                )
            kind = decode(_kind_decoder, frame)
            stream_id = kind.stream_id if isinstance(kind.stream_id, str) else None
            match kind.type:
                case "response.create":
                    self._enqueue(decode(_create_decoder, frame))
                case "response.cancel":
                    self._cancel(decode(_cancel_decoder, frame))
                case _:
                    raise invalid(Reason.INVALID_VALUE, f"Unknown event type {kind.type[:100]!r}.", "type")
        except InvalidRequest as error:
            await self._refuse(error.refusal, stream_id=stream_id)

    def _enqueue(self, request: schemas.ResponseCreate) -> None:
        refuse_unsupported(request)
        found = self._lanes.get(request.stream_id)
        if found is None:
            if len(self._lanes) >= MAX_LANES:
                raise invalid(Reason.TOO_MANY_LANES, f"At most {MAX_LANES} lanes on one socket.", "stream_id")
            lane: _Lane = asyncio.Queue(MAX_QUEUED)
            found = lane, asyncio.create_task(self._run_lane(request.stream_id, lane))
            self._lanes[request.stream_id] = found
        try:
            found[0].put_nowait((request, time.monotonic()))
        except asyncio.QueueFull:
            raise invalid(
                Reason.TOO_MANY_LANES, f"At most {MAX_QUEUED} responses wait in one lane.", "stream_id"
            ) from None

    def _cancel(self, cancel: schemas.ResponseCancel) -> None:
        entered = self._running.get(cancel.response_id)
        if entered is None:
            raise InvalidRequest(NOT_FOUND)
        self._runtime.door.cancel(entered)

    async def _run_lane(self, stream_id: str | None, lane: _Lane) -> None:
        """Until the lane is empty. A reader that was dropped for not reading takes the socket with it."""
        try:
            while not lane.empty():
                request, received_at_s = lane.get_nowait()
                try:
                    await self._run(request, received_at_s)
                except InvalidRequest as error:
                    await self._refuse(error.refusal, stream_id=stream_id)
        except asyncio.CancelledError:
            self._spawn(self._close(SLOW_READER))
            raise
        finally:
            self._lanes.pop(stream_id, None)

    async def _run(self, request: schemas.ResponseCreate, received_at_s: float) -> None:
        caller = await self._authenticate()
        if isinstance(caller, Refusal):
            await self._refuse(caller, stream_id=request.stream_id)
            await self.close(BAD_KEY)
            return
        text = self._runtime.door.texts.get(request.model)
        ask = asks.ask(
            request,
            model=request.model,
            messages=asks.input_messages(request),
            max_tokens=request.max_output_tokens,
            max_tokens_param="max_output_tokens",
            source="ws",
            received_at_s=received_at_s,
            vocabulary_size=text.vocabulary_size if text else None,
        )
        entered = await self._runtime.door.enter(caller, ask)
        if isinstance(entered, Denied):
            metrics.count_request(entered.refusal.status, entered.limits.priority_class)
            refusal = asks.in_words_of_responses(entered.refusal)
            await self._refuse(refusal, entered.limits.headers(), request.stream_id)
            return
        events = ResponseEvents(request, entered, int(time.time()))
        self._running[events.response_id] = entered
        try:
            with metrics.open_stream("websocket"):
                await self._stream(entered, events)
            metrics.count_request(200, entered.priority_class)
        finally:
            del self._running[events.response_id]
            self._runtime.door.leave(entered)

    async def _stream(self, entered: Entered, events: ResponseEvents) -> None:
        detokenizer = Detokenizer(entered.text)
        await self._send_all(events.begin())
        while True:
            delivery = await entered.stream.next()
            texts = detokenizer.feed(delivery.token_ids, visible_bytes(delivery.end))
            tail = [] if delivery.end is None else _tail(delivery.end, entered, events, texts)
            await self._send_all(tail or events.deltas(texts))
            if delivery.end is not None:
                return

    async def _authenticate(self) -> Caller | Refusal:
        return self._key if isinstance(self._key, Refusal) else await self._runtime.keys.authenticate(self._key)

    async def _watch_key(self) -> None:
        """A revoked key closes its sockets; none lives longer than an hour."""
        ends_at_s = time.monotonic() + LIFE_S
        while time.monotonic() < ends_at_s:
            await asyncio.sleep(KEY_CHECK_S)
            refusal = await self._authenticate()
            if isinstance(refusal, Refusal) and refusal.status == 401:
                await self._refuse(refusal)
                await self.close(BAD_KEY)
                return
        await self.close(GOING_AWAY)

    async def _leave_with_gateway(self) -> None:
        """The door ends what runs and refuses what waits: the lanes pass that on first."""
        await self._runtime.is_going.wait()
        lanes = [task for _, task in self._lanes.values()]
        if lanes:
            await asyncio.wait(lanes, timeout=runtime.LAST_WORDS_S)
        await self._close(GOING_AWAY)

    async def _refuse(
        self, refusal: Refusal, headers: dict[str, str] | None = None, stream_id: str | None = None
    ) -> None:
        await self._send_all([error_frame(refusal, headers or {}, stream_id)])

    async def _send_all(self, frames: Sequence[bytes]) -> None:
        """Events of one response stay together and in order, whatever other lanes send."""
        async with self._sending:
            for frame in frames:
                await self.send(text_data=frame.decode())

    async def _close(self, code: int) -> None:
        with suppress(OSError, RuntimeError):  # the socket may be gone already
            await self.close(code)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tail(end: End, entered: Entered, events: ResponseEvents, texts: list[str]) -> list[bytes]:
    if isinstance(end, Finished) and ends_in_good_order(end):
        return events.deltas(texts) + events.finish(end)
    refusal = outcome_of(end, entered)
    assert isinstance(refusal, Refusal)  # what ends in good order was met above
    return events.deltas(texts) + events.fail(refusal)
