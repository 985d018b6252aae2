"""What every page for people brings along: our own files, and a policy that lets nothing else in."""

from __future__ import annotations

import codecs
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import resolve_url
from django.urls import reverse
from django.utils.cache import patch_vary_headers
from django.utils.http import url_has_allowed_host_and_scheme
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


class PlainText(Around):
    """Always: no page and no route of the management API meets a NUL in a query, or a body in a character set that
    knows halves of characters: no text of the database holds either.
    """

    def before(self, request: HttpRequest) -> None:
        if "\0" in unquote(request.META.get("QUERY_STRING", "")):
            raise BadRequest("a NUL character in the query")
        if request.encoding is not None and codecs.lookup(request.encoding).name != "utf-8":
            raise BadRequest("a body that is not in UTF-8")


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


class BackToItsPage(Around):
    """Always: what was sent without a sign-in is said not to have been done, and the log-in leads back to the page that
    sent it, never to an address that only takes what is sent.
    """

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        if request.method in ("GET", "HEAD", "OPTIONS"):
            return
        log_in = urlsplit(answer.headers.get("Location", ""))
        wanted = parse_qs(log_in.query).get(REDIRECT_FIELD_NAME)
        if log_in.path not in (reverse("account_login"), reverse("admin:login")) or wanted != [request.get_full_path()]:
            return
        back = urlencode({REDIRECT_FIELD_NAME: _page_of(request)}, safe="/")
        answer.headers["Location"] = f"{log_in.path}?{back}"
        messages.error(request, "Nothing was done: the sign-in of that page had ended. Sign in and do it again.")


def _page_of(request: HttpRequest) -> str:
    """The page of ours that sent this; without a word of one, where everybody begins."""
    page = request.headers.get("HX-Current-URL") or request.headers.get("Referer", "")
    if not url_has_allowed_host_and_scheme(page, {request.get_host()}, require_https=request.is_secure()):
        return resolve_url(settings.LOGIN_REDIRECT_URL)
    return urlsplit(page)._replace(scheme="", netloc="", fragment="").geturl()


class ContentSecurityPolicy(Around):
    """Always: every answer of Django's says that no script, style or frame but our own files may run."""

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        answer.headers.setdefault("Content-Security-Policy", CONTENT_SECURITY_POLICY)
