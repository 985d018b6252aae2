"""What every page for people brings along: our own files, and a policy that lets nothing else in."""

from __future__ import annotations

from urllib.parse import unquote

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile

from gateway.middleware import Around

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


class PlainQuery(Around):
    """Always: no page and no route of the management API meets a NUL in a query: no text of the database holds one."""

    def before(self, request: HttpRequest) -> None:
        if "\0" in unquote(request.META.get("QUERY_STRING", "")):
            raise BadRequest("a NUL character in the query")


class Fragments(Around):
    """Always: where a fragment's answer leads elsewhere (a log-in, a new batch), the browser goes there, and no page
    lands in a corner of another; a cache tells a fragment from its page.
    """

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        patch_vary_headers(answer, ("HX-Request",))
        if "HX-Request" in request.headers and answer.has_header("Location"):
            answer.headers["HX-Redirect"] = answer.headers["Location"]
            del answer.headers["Location"]
            answer.status_code = 204


class ContentSecurityPolicy(Around):
    """Always: every answer of Django's says that no script, style or frame but our own files may run."""

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        answer.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
