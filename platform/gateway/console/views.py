"""The front page: what anybody may see."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from gateway.loads import loads
from wire.bus import BusError


@require_safe
async def front(request: HttpRequest) -> HttpResponse:
    """A first call that can be copied: the reader's own base URL, and the model that is being served just now."""
    return render(request, "front.html", {"base_url": request.build_absolute_uri("/v1"), "model": await served_model()})


async def served_model() -> str:
    """Empty while no worker can be seen."""
    try:
        return next((load.model for load in await loads()), "")
    except BusError:
        return ""
