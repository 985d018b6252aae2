"""What Django is asked with: a body that is whole and within the limits of ``/v1``, or none and why it is refused.

Django's own handler takes any body, however large and slow, to the disk before it looks at who sends it, and a body
without an announced length counts as none. Refuses to know what is in a body.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, nullcontext
from typing import Any, TypeVar

from django.conf import settings
from django.http import parse_cookie
from django.template import loader
from django.urls import Resolver404, resolve

from gateway import metrics, runtime
from gateway.console.middleware import CONTENT_SECURITY_POLICY
from gateway.console.pages.membership import tenant_of
from gateway.database_threads import asked
from gateway.errors import InvalidRequest, Reason, Refusal, invalid
from gateway.management_api.authentication import SCHEME, principal_of
from gateway.postgresql import AWAY
from gateway.v1.files import FORM_BYTES, UPLOAD_S
from gateway.v1.http import BODY_S, SECURITY_HEADERS, Exchange, Receive, Scope, Send

MANAGED = "/v1/organization/"
_UPLOADS = "console-batches"  # the one route of a page that takes a file

Django = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]
Answer = TypeVar("Answer")


class WholeBodies:
    """Always: who may not send a body is refused before it is read; no part of Django waits for one."""

    def __init__(self, django: Django, body_s: float = BODY_S) -> None:
        """``body_s``: how long a body may take that is no file."""
        self._django = django
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, asked = Exchange(scope, receive, send), dict(scope)
        try:
            async with AsyncExitStack() as held:
                limit_bytes, whole_s = await self._limits(exchange, held)
                parts = await held.enter_async_context(aclosing(exchange.body_parts(limit_bytes, whole_s)))
                told = _Told(parts, asked, receive)
                await self._django(asked, told, send)
                if told.refused is not None:
                    raise told.refused
        except InvalidRequest as error:
            await _refuse(exchange, error.refusal, send)

    async def _limits(self, exchange: Exchange, held: AsyncExitStack) -> tuple[int, float]:
        """Bytes and seconds of a whole body. Raises InvalidRequest for who may not send one."""
        if exchange.has_body and exchange.path.startswith(MANAGED):
            found = await _asked(lambda: principal_of(exchange.headers, exchange.scope["query_string"]))
            if isinstance(found, Refusal):
                raise InvalidRequest(found)
            exchange.require_json()
        slug = _upload_to(exchange) if exchange.has_body else None
        if slug is not None:
            cookies = parse_cookie(exchange.header(b"cookie"))
            session_key = cookies.get(settings.SESSION_COOKIE_NAME, "")
            tenant_id = await _asked(lambda: tenant_of(session_key, slug))
            if tenant_id is not None:
                archive = getattr(runtime.current(), "archive", None)
                held.enter_context(nullcontext() if archive is None else archive.upload(str(tenant_id)))
                return settings.RUBATO_FILE_LIMIT_BYTES + FORM_BYTES, UPLOAD_S
        return settings.RUBATO_BODY_LIMIT_BYTES, self._body_s


async def _refuse(exchange: Exchange, refusal: Refusal, send: Send) -> None:
    """In the API's shape on its routes, elsewhere a small page."""
    if exchange.path.startswith(MANAGED):
        await exchange.refuse_unread(refusal, {"www-authenticate": SCHEME} if refusal.status == 401 else {})
        metrics.count_management(refusal.status)
        return
    if not exchange.header(b"expect"):  # as ``refuse_unread``
        await exchange.discard_body()
    page = _page(refusal.message)
    told = {"content-type": "text/html; charset=utf-8", "content-length": str(len(page))} | refusal.headers()
    told |= {"content-security-policy": CONTENT_SECURITY_POLICY} | SECURITY_HEADERS
    headers = [(name.encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if exchange.method == "HEAD" else page})


async def _asked(question: Callable[[], Answer]) -> Answer:
    """Of the database, in a thread. Raises InvalidRequest while it is away."""
    try:
        return await asked(question)
    except AWAY as error:
        raise invalid(Reason.UNAVAILABLE, "The database does not answer; please come again.") from error


def _upload_to(exchange: Exchange) -> str | None:
    """The tenant whose page a file is sent to."""
    try:
        found = resolve(exchange.path)
    except Resolver404:
        return None
    return found.kwargs["slug"] if found.url_name == _UPLOADS and exchange.method == "POST" else None


class _Told:
    """What Django receives. Always: a body that is refused on its way is for Django a client that left; of a whole one
    it reads in the headers, which it looks at afterwards, how many bytes came.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], asked: dict[str, Any], receive: Receive) -> None:
        self._parts = parts
        self._asked = asked
        self._receive = receive
        self._size = 0
        self._is_whole = False
        self.refused: InvalidRequest | None = None

    async def __call__(self) -> Mapping[str, Any]:
        if self._is_whole:
            return await self._receive()
        try:
            async for part in self._parts:
                self._size += len(part)
                return {"type": "http.request", "body": part, "more_body": True}
        except InvalidRequest as error:
            self.refused = error
            return {"type": "http.disconnect"}
        self._is_whole = True
        others = [(name, value) for name, value in self._asked["headers"] if name.lower() != b"content-length"]
        length = [(b"content-length", b"%d" % self._size)] if self._size else []
        self._asked["headers"] = [*others, *length]
        return {"type": "http.request", "body": b"", "more_body": False}


@functools.lru_cache(16)
def _page(message: str) -> bytes:
    """Made once: a flood of bodies is refused at little cost."""
    return loader.get_template("refused.html").render({"message": message}).encode()
