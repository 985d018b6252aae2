"""The websocket /v1/responses: OpenAI's Responses protocol, which ``client.responses.connect()`` speaks.

Knows frames and lanes; refuses to know limits and workers. Tokens never ride a channel layer: this consumer has none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer

from gateway import metrics, runtime
from gateway.auth import Caller
from gateway.console.tickets import PROTOCOL, Visit
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.v1 import responses, schemas
from gateway.v1.answers import encode
from gateway.v1.decoding import decode, refuse_unsupported
from gateway.v1.http import read_query
from gateway.v1.outgoing import Outgoing
from gateway.v1.response_events import Event, error_frame
from gateway.v1.responses import Reading, reading
from gateway.v1.socket_holders import account_of, who_holds
from gateway.v1.socket_limits import FrameRate, open_sockets
from wire.bus import BusError

log = logging.getLogger(__name__)

BAD_QUERY, BAD_KEY, SLOW_READER, TOO_MANY = 4400, 4401, 4408, 4429
OVERLOADED, GOING_AWAY, INTERNAL = 1013, 1012, 1011
MAX_LANES = 16
MAX_QUEUED = 64  # responses that wait in one lane
KEY_CHECK_S = 5.0  # a key that changes is looked at once more at once
HEARTBEAT_S = 15.0  # of silence; no proxy cuts the line, and a client knows that we are there
LIFE_S = 3600.0
STUCK_S = 20.0  # for one frame to leave
CLOSE_S = 1.0  # for the close frame

Job = schemas.ResponseCreate | schemas.ResponseResume
_Lane = asyncio.Queue[tuple[Job, float]]


class _Kind(msgspec.Struct, frozen=True):
    """The part of any frame that says what it is."""

    type: str
    stream_id: Any = None


_PONG: Event = {"type": "pong"}
_kind_decoder = msgspec.json.Decoder(_Kind)
_create_decoder = msgspec.json.Decoder(schemas.ResponseCreate)
_cancel_decoder = msgspec.json.Decoder(schemas.ResponseCancel)
_resume_decoder = msgspec.json.Decoder(schemas.ResponseResume)
_ping_decoder = msgspec.json.Decoder(schemas.Ping)


class ResponsesConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # channels brings no types
    """One socket. Always: jobs with the same ``stream_id`` run one after another, others side by side; when the socket
    closes, whatever still runs is cancelled, except what was asked for in the background; once a close is decided no
    frame is obeyed.
    """

    channel_layer_alias = "none: tokens never ride a layer"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._dropped = False
        self._is_closing = False
        self._call = asyncio.current_task()
        try:
            with ExitStack() as self._held:
                await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            if not self._dropped:
                raise

    async def connect(self) -> None:
        self._lanes: dict[str | None, tuple[_Lane, asyncio.Task[None]]] = {}
        self._running: dict[str, Reading] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outgoing = Outgoing(self.send)
        self._frame_rate = FrameRate()
        offered = self.scope.get("subprotocols") or ()
        await self.accept(PROTOCOL if PROTOCOL in offered else None)
        current = runtime.current()
        if current is None:
            await self._close(OVERLOADED)
            return
        self._runtime = current
        self._spawn(self._send_frames())
        self._spawn(self._watch_reader())
        self._holder = await who_holds(current, self.scope)
        caller = await self._authenticate()
        if isinstance(caller, Refusal):
            await self._refuse(caller)
            await self._close(BAD_KEY if caller.status == 401 else OVERLOADED)
            return
        try:
            read_query(self.scope["query_string"])
        except InvalidRequest as error:
            await self._refuse(error.refusal)
            await self._close(BAD_QUERY)
            return
        if not self._held.enter_context(open_sockets.held(caller.key_id or caller.project_id)):
            await self._refuse(_TOO_MANY_SOCKETS)
            await self._close(TOO_MANY)
            return
        self._spawn(self._outgoing.beat(HEARTBEAT_S, _HEARTBEAT))
        self._spawn(self._watch_key())
        self._spawn(self._leave_with_gateway())

    async def disconnect(self, code: int) -> None:
        self._dropped = True
        await self._stop()

    async def _stop(self) -> None:
        me = asyncio.current_task()
        tasks = [*self._tasks, *(task for _, task in self._lanes.values())]
        others = [task for task in tasks if task is not me]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S)  # one that the server's send holds does not hold us

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        frame = text_data.encode() if text_data is not None else bytes_data or b""
        stream_id = None
        if self._is_closing:
            return
        if not self._frame_rate.take():
            await self._refuse(_TOO_MANY_FRAMES)
            await self._close(TOO_MANY)
            return
        try:
            if len(frame) > self._runtime.body_limit_bytes:
                raise invalid(
                    Reason.BODY_TOO_LARGE, f"A frame may have at most {self._runtime.body_limit_bytes} bytes."
                )
            kind = decode(_kind_decoder, frame)
            stream_id = kind.stream_id if isinstance(kind.stream_id, str) else None
            match kind.type:
                case "response.create":
                    request = decode(_create_decoder, frame)
                    refuse_unsupported(request)
                    self._enqueue(request, request.stream_id)
                case "response.resume":
                    resume = decode(_resume_decoder, frame)
                    self._enqueue(resume, resume.stream_id)
                case "response.cancel":
                    await self._cancel(decode(_cancel_decoder, frame))
                case "ping":
                    ping = decode(_ping_decoder, frame)
                    await self._outgoing.put([_frame(_PONG, ping.stream_id)])
                case _:
                    raise invalid(Reason.INVALID_VALUE, f"Unknown event type {kind.type[:100]!r}.", "type")
        except InvalidRequest as error:
            await self._refuse(error.refusal, error.headers, stream_id)
        except BusError as error:
            await self._refuse(_no_answer(error), stream_id=stream_id)

    def _enqueue(self, job: Job, stream_id: str | None) -> None:
        found = self._lanes.get(stream_id)
        if found is None:
            if len(self._lanes) >= MAX_LANES:
                raise invalid(Reason.TOO_MANY_LANES, f"At most {MAX_LANES} lanes on one socket.", "stream_id")
            lane: _Lane = asyncio.Queue(MAX_QUEUED)
            found = lane, self._watched(self._run_lane(stream_id, lane))
            self._lanes[stream_id] = found
        try:
            found[0].put_nowait((job, time.monotonic()))
        except asyncio.QueueFull:
            raise invalid(
                Reason.TOO_MANY_LANES, f"At most {MAX_QUEUED} responses wait in one lane.", "stream_id"
            ) from None

    async def _cancel(self, cancel: schemas.ResponseCancel) -> None:
        door, found = self._runtime.door, self._running.get(cancel.response_id)
        if found is not None:
            door.cancel(found.stream)
            return
        caller = await self._authenticate()
        if isinstance(caller, Refusal):
            raise InvalidRequest(caller)
        with reading(door, await responses.find(self._runtime, caller, cancel.response_id, to_read=False)) as elsewhere:
            if elsewhere.stream.end is None:
                door.cancel(elsewhere.stream)

    async def _run_lane(self, stream_id: str | None, lane: _Lane) -> None:
        """Until the lane is empty. A reader that was dropped for not reading takes the socket with it."""
        try:
            while not lane.empty():
                job, received_at_s = lane.get_nowait()
                try:
                    await self._run(job, received_at_s)
                except InvalidRequest as error:
                    metrics.count_request(error.refusal.status, error.priority_class)
                    await self._refuse(error.refusal, error.headers, stream_id)
                except BusError as error:
                    metrics.count_request(503, None)
                    await self._refuse(_no_answer(error), stream_id=stream_id)
        except asyncio.CancelledError:
            self._spawn(self._drop())
            raise
        finally:
            self._lanes.pop(stream_id, None)

    async def _run(self, job: Job, received_at_s: float) -> None:
        caller = await self._authenticate()
        if isinstance(caller, Refusal):
            await self._refuse(caller, stream_id=job.stream_id)
            if caller.status == 401:
                await self._close(BAD_KEY)
            return
        if isinstance(job, schemas.ResponseResume):
            found, after = await responses.find(self._runtime, caller, job.response_id), job.starting_after
        else:
            source = "console" if isinstance(self._holder, Visit) else "ws"
            found = await responses.create(self._runtime, caller, job, source=source, received_at_s=received_at_s)
            after = -1
        self._running[found.head.name] = found
        try:
            with reading(self._runtime.door, found), metrics.open_stream("websocket"):
                await self._stream(found, after, job.stream_id)
            metrics.count_request(200, found.head.priority_class)
        finally:
            self._running.pop(found.head.name, None)

    async def _stream(self, found: Reading, starting_after: int, stream_id: str | None) -> None:
        async for events in found.events(starting_after):
            await self._outgoing.put([_frame(event, stream_id) for event in events])
        if isinstance(self._holder, Visit) and found.stream.end is not None:
            told = account_of(self._runtime, self._holder, found.head.name, found.stream.submit, found.stream.end)
            await self._outgoing.put([_frame(told, stream_id)])

    async def _authenticate(self) -> Caller | Refusal:
        return self._holder if isinstance(self._holder, Refusal) else await self._holder.authenticate()

    async def _watch_key(self) -> None:
        """A revoked key closes its sockets; none lives longer than an hour."""
        ends_at_s, num_changes = time.monotonic() + LIFE_S, self._runtime.keys.num_changes
        while time.monotonic() < ends_at_s:
            num_changes = await self._runtime.keys.until_changed(num_changes, KEY_CHECK_S)
            refusal = await self._authenticate()
            if isinstance(refusal, Refusal) and refusal.status == 401:
                await self._refuse(refusal)
                await self._close(BAD_KEY)
                return
        await self._close(GOING_AWAY)

    async def _send_frames(self) -> None:
        """Until the client has gone, which the server may say by refusing to send."""
        with suppress(OSError):
            await self._outgoing.run()

    async def _watch_reader(self) -> None:
        """A client that lets a frame stand for too long is taken for gone: nothing more is made for it."""
        await self._outgoing.until_stuck(STUCK_S)
        log.warning("a websocket has not been read for %.0f s; closing it", STUCK_S)
        await self._drop()

    async def _drop(self) -> None:
        """Cancels all that runs, says why if the client can still hear it, and lets go of the connection."""
        if self._dropped:
            return
        self._dropped = True
        await self._stop()
        closing = asyncio.create_task(self._send_close(SLOW_READER))
        await asyncio.wait([closing], timeout=CLOSE_S)
        closing.cancel()
        if self._call is not None:
            self._call.cancel()

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
        await self._outgoing.put([error_frame(refusal, headers or {}, stream_id)])

    async def _close(self, code: int) -> None:
        """After what has still to be sent, if it leaves in time."""
        self._is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._outgoing.until_empty()
        await self._send_close(code)

    async def _send_close(self, code: int) -> None:
        self._is_closing = True
        with suppress(OSError, RuntimeError):  # the socket may be gone already
            await self.close(code)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._watched(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """What breaks for a reason that nobody foresaw takes its socket with it: no client waits for ever."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a websocket is closed for a failure of ours", exc_info=error)
                self._spawn(self._send_close(INTERNAL))

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task


def _frame(event: Event, stream_id: str | None) -> bytes:
    return encode(event if stream_id is None else {**event, "stream_id": stream_id})


_HEARTBEAT = encode({"type": "keepalive"})
_TOO_MANY_FRAMES = Refusal(reason=Reason.TOO_MANY_FRAMES, message="More frames than one socket may send.")
_TOO_MANY_SOCKETS = Refusal(reason=Reason.TOO_MANY_SOCKETS, message="This key has as many sockets as it may have.")


def _no_answer(error: BusError) -> Refusal:
    message = f"The platform's memory does not answer ({type(error).__name__}); please send the request again."
    return Refusal(reason=Reason.UNAVAILABLE, message=message)
