"""DRF's exceptions in the OpenAI error shape, and Django's error handlers. One table of statuses; refuses to show a
stack trace, and to read a body: Django's own handlers look there for a form's token, and it may be what cannot be read.
"""

from __future__ import annotations

import sys
from typing import Any

from django.core.exceptions import ObjectDoesNotExist
from django.core.exceptions import ValidationError as ModelError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template import loader
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.response import Response
from rest_framework.views import exception_handler

from gateway.errors import PERHAPS_DONE, Reason, Refusal
from gateway.postgresql import AWAY
from tenants.refusals import StillGood

_TYPES = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    409: ("invalid_request_error", "conflict"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
}
_WORDS = {  # what DRF calls a wrong field -> how its message begins, and its code
    "required": ("Missing required parameter: {!r}.", "missing_required_parameter"),
    "unknown": ("Unknown parameter: {!r}.", "unknown_parameter"),
    "unsupported": ("{!r} is not supported here.", "unsupported_parameter"),
}
_ENDS_IT = "end_previous_secret"
_COME_AGAIN = Refusal(reason=Reason.UNAVAILABLE, message="The database does not answer; please come again.")
_NOT_FOUND = "There is no such object."


def error_body(status_code: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Always all four keys."""
    error_type, usual = _TYPES.get(status_code, ("invalid_request_error", "invalid_request"))
    return {"error": {"message": message, "type": error_type, "param": param, "code": code or usual}}


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """DRF's EXCEPTION_HANDLER. What it does not know stays an exception: logged, and answered by ``internal``."""
    if isinstance(error, Http404 | ObjectDoesNotExist):
        return Response(error_body(404, _NOT_FOUND), status=404)
    if isinstance(error, StillGood):
        body = error_body(409, f"{error.messages[0]} ({_ENDS_IT!r}: true)", _ENDS_IT)
        return Response(body, status=409, headers={"x-should-retry": "false"})
    if isinstance(error, ModelError):
        param, message = _first(error.message_dict if hasattr(error, "error_dict") else {None: error.messages})
        return Response(_invalid(param, message), status=400)
    answer = exception_handler(error, context)
    if answer is None:
        return None
    if isinstance(error, exceptions.ValidationError):
        answer.data = _invalid(*_first(error.detail))
    else:
        answer.data = error_body(answer.status_code, str(getattr(error, "detail", error)))
    return answer


def _invalid(param: str | None, detail: str) -> dict[str, Any]:
    """A field that is wrong, in the words of the rest of ``/v1``: always with its name."""
    if param is None:
        return error_body(400, detail)
    words, code = _WORDS.get(getattr(detail, "code", ""), ("Invalid {!r}:", None))
    return error_body(400, f"{words.format(param)} {detail}", param, code)


def _first(detail: Any) -> tuple[str | None, str]:
    """The first field that is wrong, and why."""
    if isinstance(detail, dict):
        name, inner = next(iter(detail.items()))
        below, message = _first(inner)
        if name in (None, "__all__", "non_field_errors"):
            return below, message
        return (f"{name}.{below}" if below else str(name)), message
    if isinstance(detail, list | tuple):
        return _first(detail[0])
    return None, detail if isinstance(detail, str) else str(detail)


@csrf_exempt  # a key, not a cookie: whatever the method, it is JSON
def not_found(request: HttpRequest, path: str = "") -> JsonResponse:
    """Any other path under the API."""
    body = error_body(404, f"There is no {request.path[:200]} here.")
    body["error"]["code"] = "route_not_found"  # as elsewhere under /v1
    return JsonResponse(body, status=404)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler400: a wrong Host header, for one."""
    if _is_api(request):
        words = "The request cannot be read: check its Host header, its path, its query, and that it is in UTF-8."
        return JsonResponse(error_body(400, words), status=400)
    return render(request, "400.html", status=400)


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler403."""
    return render(request, "403.html", status=403)


def no_page(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler404."""
    return render(request, "404.html", status=404)


def internal(request: HttpRequest) -> HttpResponse:
    """Django's handler500, called while the error is handled: a database that does not answer is a 503."""
    if isinstance(sys.exc_info()[1], AWAY):
        return _away(request)
    if _is_api(request):
        return JsonResponse(error_body(500, "Something went wrong on our side."), status=500)
    return HttpResponse(loader.get_template("500.html").render(), status=500)


def _away(request: HttpRequest) -> HttpResponse:
    """Who only looked may come again; of what would have changed something nobody knows whether it did."""
    is_sent = request.method not in ("GET", "HEAD", "OPTIONS")
    refusal = PERHAPS_DONE if is_sent else _COME_AGAIN
    if _is_api(request):
        return HttpResponse(refusal.body(), status=503, content_type="application/json", headers=refusal.headers())
    page = loader.get_template("503.html").render({"is_sent": is_sent})
    return HttpResponse(page, status=503, headers=refusal.headers())


def _is_api(request: HttpRequest) -> bool:
    return request.path.startswith("/v1/")
