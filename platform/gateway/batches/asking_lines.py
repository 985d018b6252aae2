"""One line asked as a request: its endpoint's own handler, with a door that knows the line, and no socket.

Knows how a request looks to a handler; refuses to know batches, retries and rows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.admission import Denied
from gateway.asking import Ask
from gateway.auth import Caller
from gateway.batches.endpoints import HANDLERS
from gateway.door import Entered, Keep
from gateway.errors import InvalidRequest, Reason, Refusal
from gateway.response_stream import Reader, ResponseStream
from gateway.runtime import Runtime
from gateway.shown_again import shown_again
from gateway.text import Text
from gateway.v1.http import Exchange
from gateway.v1.routes import Call
from scheduler_engine.events import FinishReason, RejectReason
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError, FinishedOutput
from wire.messages import Finished, Rejected

SOURCE: Final = "batch"
TIER: Final = "flex"
_TOO_LATE: Final = (RejectReason.LATE, RejectReason.QUEUE_WAIT)
STOPPED: Final = "expired"  # to the worker: what a batch stops is not charged


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an endpoint answered. ``is_too_late``: the line itself set a time after which it wants no answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    is_too_late: bool = False

    @property
    def code(self) -> str:
        """The machine's word for a refusal; empty for an answer."""
        return "" if self.status == 200 else str(json.loads(self.body)["error"]["code"])


class LineDoor:
    """What a line's endpoint takes for the door.

    Always: who is let in here is of the batch class, under the line's own operation. With the ``output`` of that
    operation nobody is let in any more: the endpoint shows what was computed.
    """

    def __init__(self, runtime: Runtime, response_id: str, output: FinishedOutput | None = None) -> None:
        self._door = runtime.door
        self._policy = runtime.policy
        self._response_id = response_id
        self._output = output
        self._has_deadline = False
        self._stream: ResponseStream | None = None

    @property
    def is_too_late(self) -> bool:
        """A time that the line itself set was over, or could not be met."""
        match self._stream and self._stream.end:
            case Rejected(reason=reason):
                reasons = [reason]
            case Finished(choices=choices):  # some had started, and another was shed
                reasons = [choice.detail for choice in choices if choice.reason == FinishReason.SHED]
            case _:
                reasons = []
        return self._has_deadline and any(reason in _TOO_LATE for reason in reasons)

    @property
    def texts(self) -> Mapping[str, Text]:
        return self._door.texts

    async def enter(self, caller: Caller, asks: Sequence[Ask], keep: Keep | None = None) -> list[Entered] | Denied:
        [ask] = asks  # a line has one prompt
        self._has_deadline = any((ask.deadline_ms, ask.completion_deadline_ms, ask.max_queue_wait_ms))
        own = replace(ask, source=SOURCE, service_tier=TIER, response_id=self._response_id)
        if self._output is None:
            found = await self._door.enter(caller, [own], if_stopped=STOPPED)
            self._stream = None if isinstance(found, Denied) else found[0].stream
            return found
        return [await shown_again(self.texts, self._policy, caller, own, PriorityClass.BATCH, self._output)]

    def leave(self, entered: Entered) -> None:
        self.stop_reading(entered.stream, entered.reader)

    def stop_reading(self, stream: ResponseStream, reader: Reader) -> None:
        if self._output is None:
            self._door.stop_reading(stream, reader, STOPPED)

    def cancel(self, stream: ResponseStream, reason: str = STOPPED) -> None:
        if self._output is None:
            self._door.cancel(stream, STOPPED)


@dataclass(frozen=True, slots=True)
class _LineRuntime:
    """As much of a runtime as the handlers of a batch's endpoints use."""

    door: LineDoor
    body_limit_bytes: int


async def ask_line(
    runtime: Runtime,
    *,
    endpoint: str,
    caller: Caller,
    body: bytes,
    response_id: str,
    output: FinishedOutput | None = None,
) -> Reply:
    """The answer or the refusal, as a client would get it. Cancelled, the operation ends at no charge."""
    door = LineDoor(runtime, response_id, output)
    socket = _NoSocket()
    exchange = Exchange(_SCOPE, socket.receive, socket.send)
    exchange.hand_in(body)
    line_runtime: Any = _LineRuntime(door, runtime.body_limit_bytes)
    try:
        await HANDLERS[endpoint](Call(exchange, line_runtime, caller, ()))
    except InvalidRequest as error:
        await exchange.refuse(error.refusal, error.headers)
    except BusError as error:
        message = f"The platform's memory does not answer ({type(error).__name__})."
        await exchange.refuse(Refusal(reason=Reason.UNAVAILABLE, message=message))
    return Reply(
        status=socket.status,
        headers=socket.headers,
        body=b"".join(socket.parts),
        request_id=exchange.request_id,
        is_too_late=door.is_too_late,
    )


_SCOPE: Mapping[str, Any] = {"type": "http", "method": "POST", "path": "", "headers": [], "query_string": b""}


class _NoSocket:
    """ASGI's two callables: a client that never leaves, and an answer that is kept."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []

    async def receive(self) -> Mapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))
