"""A request of /v1 on raw ASGI: headers, body within its limit, answers in bytes.

Knows ASGI messages; refuses to know what is asked.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header

from gateway.errors import Reason, Refusal, invalid
from gateway.v1.bodies import Arrival, late_bodies
from scheduler_engine.policy import PriorityClass

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

JSON = "application/json"
API_VERSION = "2020-10-01"  # the one version that OpenAI's own API has ever named
BODY_S = 30.0  # for a whole body to arrive
DISCARD_BYTES = 32 * 1_048_576  # of a refused body; a client that is still sending would miss the answer
DISCARD_S = 5.0
DISCARD_IDLE_S = 0.5  # a client that sends nothing for so long waits for the answer


MAX_KEPT_BYTES = 16 * 1_048_576  # of one answer that is kept to be given again
SECURITY_HEADERS = {"x-content-type-options": "nosniff"}  # on every answer; behind TLS asgi.py adds its lock
_OF_ITS_OWN = ("x-request-id", "openai-processing-ms", "sunset")  # headers of one exchange, not of the answer


@dataclass(slots=True)
class Answer:
    """An answer as it went out. Always: ``is_good`` says that it is whole, small enough, and neither a refusal nor, by
    its body, a failure.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    num_bytes: int = 0
    is_failure: bool = False

    @property
    def is_good(self) -> bool:
        is_kept = self.is_whole and self.num_bytes <= MAX_KEPT_BYTES
        return 200 <= self.status < 300 and is_kept and not self.is_failure

    def add(self, part: bytes) -> None:
        self.num_bytes += len(part)
        if self.num_bytes <= MAX_KEPT_BYTES:
            self.parts.append(part)


def read_query(query_string: bytes, *known: str) -> dict[str, str]:
    """Raises InvalidRequest for a name that is not known, or comes twice."""
    query: dict[str, str] = {}
    for name, value in parse_qsl(query_string.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            raise invalid(Reason.UNKNOWN_PARAMETER, f"Unknown parameter: {name[:80]!r}.", name[:80])
        if name in query:
            raise invalid(Reason.INVALID_VALUE, f"{name!r} is given more than once.", name)
        if "\0" in value:
            raise invalid(Reason.INVALID_VALUE, f"{name!r} must not hold a NUL character.", name)
        query[name] = value
    return query


class BodyBroken(Exception):
    """The body ended before it was whole: the client left, stopped sending, or sent chunks that are none."""


class Exchange:
    """One request and its answer. Always: the answer is started at most once; every answer carries ``x-request-id``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = f"req_{secrets.token_hex(16)}"
        self.received_at_s = time.monotonic()
        self.status: int | None = None
        self.priority_class: PriorityClass | None = None  # once it is known, for the counters
        self.operation_id: str | None = None  # of what is made here, where an Idempotency-Key names it
        self.sunset_at_s: float | None = None  # when the caller's rotated secret stops opening
        self._first_values: Mapping[bytes, bytes] | None = None
        self._body: bytes | None = None
        self._body_is_read = False
        self._kept: Answer | None = None
        self._is_gone = False
        self._receive = receive
        self._send = send

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method

    @property
    def headers(self) -> Iterable[tuple[bytes, bytes]]:
        headers: Iterable[tuple[bytes, bytes]] = self.scope["headers"]
        return headers

    @property
    def address(self) -> str:
        """Where the connection comes from; empty where the server does not know."""
        client = self.scope.get("client")
        return client[0] if client else ""

    @property
    def has_body(self) -> bool:
        """Whether one is announced: without that, HTTP/1.1 knows none."""
        return self.header(b"transfer-encoding") != "" or self.header(b"content-length") not in ("", "0")

    def header(self, name: bytes) -> str:
        """The first value, or empty."""
        if self._first_values is None:
            self._first_values = {key.lower(): value for key, value in reversed(list(self.headers))}
        return self._first_values.get(name, b"").decode("latin-1")

    def header_values(self, name: bytes) -> list[str]:
        """All values, in their order."""
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name]

    def query(self, *known: str) -> dict[str, str]:
        """As ``read_query``."""
        return read_query(self.scope["query_string"], *known)

    @property
    def is_return(self) -> bool:
        """The client library counts its tries: this one was refused before, and told when to come back."""
        return self.header(b"x-stainless-retry-count") not in ("", "0")

    async def json_body(self, limit_bytes: int) -> bytes:
        """The whole body, also a second time. Raises InvalidRequest for another media type, above the limit, too slow
        and broken off.
        """
        if self._body is None:
            self._body = await self._read_json(limit_bytes)
        return self._body

    async def _read_json(self, limit_bytes: int) -> bytes:
        self.require_json()
        return b"".join([part async for part in self.body_parts(limit_bytes, BODY_S)])

    def require_json(self) -> None:
        """Raises InvalidRequest where the body is announced as anything but plain JSON in UTF-8."""
        media_type, options = parse_options_header(self.header(b"content-type"))
        is_utf_8 = options.get(b"charset", b"utf-8").lower() in (b"utf-8", b"utf8")
        is_plain = self.header(b"content-encoding") in ("", "identity")
        if not (media_type in (b"", JSON.encode()) and is_utf_8 and is_plain):
            words = "Send the body as plain 'Content-Type: application/json', in UTF-8."
            raise invalid(Reason.UNSUPPORTED_MEDIA_TYPE, words)

    def hand_in(self, body: bytes) -> None:
        """The body is here already: a line of a batch has no socket to read it from."""
        self._body, self._body_is_read = body, True

    async def body_parts(self, limit_bytes: int, whole_s: float) -> AsyncGenerator[bytes, None]:
        """The body as it arrives; to be closed where it is not read to its end. Raises InvalidRequest above the limit,
        broken off, when nothing comes, when it is not whole after ``whole_s``, and for one late body too many.
        """
        too_large = invalid(Reason.BODY_TOO_LARGE, f"The body may have at most {limit_bytes} bytes.")
        announced = self.header(b"content-length")
        if announced.isascii() and announced.isdigit() and int(announced) > limit_bytes:
            raise too_large
        size, ends_at_s = 0, time.monotonic() + whole_s
        with Arrival(self.address, late_bodies) as arrival:
            while not self._body_is_read:
                part = await self._part_by(ends_at_s, arrival)
                size += len(part)
                if size > limit_bytes:
                    raise too_large
                yield part

    async def _part_by(self, ends_at_s: float, arrival: Arrival) -> bytes:
        left_s = ends_at_s - time.monotonic()
        try:
            async with arrival.within(min(BODY_S, left_s)):
                return await self._body_part()
        except BodyBroken as error:
            raise invalid(Reason.INVALID_REQUEST, "The body broke off, or is not framed as announced.") from error
        except TimeoutError as error:
            words = "The body took too long." if left_s <= BODY_S else f"Nothing of the body came for {BODY_S:.0f} s."
            raise invalid(Reason.BODY_TOO_SLOW, words) from error

    async def discard_body(self) -> None:
        """Read what is left of a body that is refused, within bounds."""
        size = 0
        with suppress(TimeoutError, BodyBroken):
            async with asyncio.timeout(DISCARD_S):
                while not self._body_is_read and size < DISCARD_BYTES:
                    async with asyncio.timeout(DISCARD_IDLE_S):
                        size += len(await self._body_part())

    async def _body_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._body_is_read = True  # all there will be; the server may still take an answer
            raise BodyBroken
        self._body_is_read = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def watch_disconnect(self, on_gone: Callable[[], None]) -> Disconnect:
        """Call ``on_gone`` when the client leaves, until the block ends. Only after the body was read.

        An answer that is kept goes on without its client.
        """
        return Disconnect(self._receive, on_gone if self._kept is None else self._go_on_alone)

    def _go_on_alone(self) -> None:
        self._is_gone = True

    def keep_answer(self) -> Answer:
        """What goes out from now on, to be given again; it is written to its end even when the client leaves."""
        self._kept = Answer()
        return self._kept

    def tell_failure(self) -> None:
        """What goes out says that it failed, whatever its status is: it is given to nobody again."""
        if self._kept is not None:
            self._kept.is_failure = True

    async def replay(self, answer: Answer, headers: Mapping[str, str]) -> None:
        await self.start(answer.status, {**answer.headers, **headers})
        await self.end(b"".join(answer.parts))

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        processing_ms = str(int((time.monotonic() - self.received_at_s) * 1_000))
        own = {"x-request-id": self.request_id, "openai-version": API_VERSION, "openai-processing-ms": processing_ms}
        own.update(SECURITY_HEADERS)
        own.update(self._sunset())
        own.update(headers)
        if self._kept is not None:
            self._kept.status = status
            self._kept.headers = {name: value for name, value in own.items() if name not in _OF_ITS_OWN}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in own.items()]
        await self._pass_on({"type": "http.response.start", "status": status, "headers": encoded})

    def _sunset(self) -> dict[str, str]:
        """RFC 8594: the secret that was sent has been rotated away and stops opening then."""
        if self.sunset_at_s is None:
            return {}
        return {"sunset": formatdate(self.sunset_at_s, usegmt=True)}

    async def write(self, body: bytes) -> None:
        if self._kept is not None:
            self._kept.add(body)
        await self._pass_on({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._end(body, is_whole=True)

    async def break_off(self, body: bytes) -> None:
        """The end of an answer that went wrong after it had begun: ``body`` says so."""
        await self._end(body, is_whole=False)

    async def _end(self, body: bytes, *, is_whole: bool) -> None:
        if self._kept is not None:
            self._kept.add(body)
            self._kept.is_whole = is_whole
        await self._pass_on({"type": "http.response.body", "body": body, "more_body": False})

    async def _pass_on(self, message: Mapping[str, Any]) -> None:
        if not self._is_gone:
            await self._send(message)

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole JSON answer."""
        own = {"content-type": JSON, "content-length": str(len(body)), **(headers or {})}
        await self.start(status, own)
        await self.end(b"" if self.method == "HEAD" else body)

    async def refuse(self, refusal: Refusal, headers: Mapping[str, str] | None = None) -> None:
        await self.answer(refusal.status, refusal.body(), {**(headers or {}), **refusal.headers()})

    async def refuse_unread(self, refusal: Refusal, headers: Mapping[str, str] | None = None) -> None:
        """What still comes of the body is read first, within bounds: a client that is still sending would miss the
        answer. One that waits for our word to send is not given it.
        """
        if not self.header(b"expect"):
            await self.discard_body()
        await self.refuse(refusal, headers)


class Disconnect:
    """Watches for the client's leaving while a block runs."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self._receive = receive
        self._on_gone = on_gone

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_gone()
