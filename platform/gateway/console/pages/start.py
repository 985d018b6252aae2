"""The first page of a tenant: what to call, with which key, and how much is left."""

from __future__ import annotations

from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from gateway.console.pages.limits import limits_of
from gateway.console.pages.membership import Member, page
from gateway.console.views import served_model
from tenants import selectors
from tenants.roles import Capability


@page(Capability.SEE_USAGE)
def start(request: HttpRequest, me: Member) -> HttpResponse:
    """The reader's own base URL and key name, and the model that is served now, in curl, Python and JavaScript."""
    newest = selectors.open_keys().order_by("-created_at").first()
    context = {
        "me": me,
        "base_url": request.build_absolute_uri("/v1"),
        "key": newest,
        "model": async_to_sync(served_model)() or "MODEL",
        **limits_of(me),
    }
    return render(request, "console/start.html", context)
