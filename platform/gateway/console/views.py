"""The front page: what anybody may see."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from gateway.loads import loads
from wire.bus import BusError


@require_safe
async def front(request: HttpRequest) -> HttpResponse:
    """A first call that can be copied: the reader's own base URL, and the model that is being served just now."""
    context = {"base_url": request.build_absolute_uri("/v1"), "model": await served_model()}
    return await sync_to_async(render)(request, "front.html", context)  # the menu reads who is signed in


async def served_model() -> str:
    """Empty while no worker can be seen."""
    try:
        return next((load.model for load in await loads()), "")
    except BusError:
        return ""
