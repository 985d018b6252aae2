"""The pages for people: the front page and the live page. They translate; the numbers come over the socket."""

from __future__ import annotations

from django.contrib.admin.views.decorators import staff_member_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from gateway.loads import loads
from scheduler_engine.policy import PriorityClass
from wire.bus import BusError


@require_safe
async def front(request: HttpRequest) -> HttpResponse:
    """A first call that can be copied: the reader's own base URL, and the model that is being served just now."""
    return render(request, "front.html", {"base_url": request.build_absolute_uri("/v1"), "model": await _model()})


@require_safe
@staff_member_required
async def live(request: HttpRequest) -> HttpResponse:
    return render(request, "operator/live.html", {"classes": [each.label for each in PriorityClass]})


async def _model() -> str:
    """Empty while no worker can be seen."""
    try:
        return next((load.model for load in await loads()), "")
    except BusError:
        return ""
