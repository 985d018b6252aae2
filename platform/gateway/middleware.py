"""Django middleware for a handler of either kind, asynchronous or not, without the thread that Django would take."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase


class Around:
    """Always: ``before`` has returned when the handler is asked, and its answer goes out as ``after`` leaves it."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        self.before(request)
        if self._is_async:
            return self._answer(request)
        answer: HttpResponseBase = self._get_response(request)
        self.after(request, answer)
        return answer

    async def _answer(self, request: HttpRequest) -> HttpResponseBase:
        answer: HttpResponseBase = await self._get_response(request)
        self.after(request, answer)
        return answer

    def before(self, request: HttpRequest) -> None:
        """May raise what Django turns into an answer."""

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        """May change the answer's headers."""
