"""What every page for people brings along: our own files, and a policy that lets nothing else in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)


class StaticFiles(WhiteNoiseMiddleware):  # type: ignore[misc]  # WhiteNoise brings no types
    """WhiteNoise under ASGI. Always: a file goes out whole; it is small, and read bit by bit it is a warning there."""

    @staticmethod
    def serve(static_file: StaticFile, request: HttpRequest) -> HttpResponse:
        found = static_file.get_response(request.method, request.META)
        content = b""
        if found.file is not None:
            with found.file as file:
                content = file.read()
        return HttpResponse(content, status=int(found.status), headers=dict(found.headers))


class PlainQuery:
    """Always: no page and no route of the management API meets a NUL in a query: no text of the database holds one."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if "\0" in unquote(request.META.get("QUERY_STRING", "")):
            raise BadRequest("a NUL character in the query")
        return self._get_response(request)


class ContentSecurityPolicy:
    """Always: every answer of Django's says that no script, style or frame but our own files may run."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self._is_async:
            return self._answer(request)
        return _with_policy(self._get_response(request))

    async def _answer(self, request: HttpRequest) -> HttpResponseBase:
        return _with_policy(await self._get_response(request))


def _with_policy(response: HttpResponseBase) -> HttpResponseBase:
    response.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
    return response
