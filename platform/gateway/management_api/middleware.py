"""What every call under ``/v1/organization`` has, whoever answers it: an id, and a place in this gateway's counters."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from gateway import metrics

HEADER = "x-request-id"


class Numbered:
    """Always: an answer carries the ``request_id`` under which the audit trail names its call, also where no view was
    reached. Stands first of all middleware: what the others refuse is answered through it.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        request_id = f"req_{secrets.token_hex(16)}"
        vars(request)["request_id"] = request_id
        if self._is_async:
            return self._answer(request, request_id)
        return _noted(request, self._get_response(request), request_id)

    async def _answer(self, request: HttpRequest, request_id: str) -> HttpResponseBase:
        return _noted(request, await self._get_response(request), request_id)


def _noted(request: HttpRequest, answer: HttpResponseBase, request_id: str) -> HttpResponseBase:
    if request.path.startswith("/v1/"):
        answer.headers[HEADER] = request_id
        metrics.count_management(answer.status_code)
    return answer
