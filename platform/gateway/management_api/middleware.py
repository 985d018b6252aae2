"""What every call under ``/v1/organization`` has, whoever answers it: an id, and a place in this gateway's counters."""

from __future__ import annotations

import secrets

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from gateway import metrics
from gateway.middleware import Around

HEADER = "x-request-id"


class Numbered(Around):
    """Always: an answer carries the ``request_id`` under which the audit trail names its call, also where no view was
    reached. Stands first of all middleware: what the others refuse is answered through it.
    """

    def before(self, request: HttpRequest) -> None:
        vars(request)["request_id"] = f"req_{secrets.token_hex(16)}"

    def after(self, request: HttpRequest, answer: HttpResponseBase) -> None:
        if request.path.startswith("/v1/"):
            answer.headers[HEADER] = vars(request)["request_id"]
            metrics.count_management(answer.status_code)
