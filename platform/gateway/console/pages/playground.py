"""The playground: the page, and the ticket with which it opens the API's own websocket.

Knows which models and tiers a tenant has; refuses to know how an answer is made: that is the door's (P04).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.shortcuts import get_object_or_404, render

from gateway import runtime
from gateway.asking import TIER_OF_CLASS
from gateway.auth import Caller
from gateway.console import tickets
from gateway.console.pages.limits import budgets_of
from gateway.console.pages.membership import Member, page
from scheduler_engine.policy import PriorityClass
from tenants.models import Project, QuotaPolicy
from tenants.roles import Capability
from wire.bus import BusError

_DOWN = "The platform's memory does not answer; please try again."
_CLASS_OF_TIER = {tier: priority_class.label for priority_class, tier in TIER_OF_CLASS.items()}


@dataclass(frozen=True, slots=True)
class Model:
    """What the tenant may ask, at which service tiers."""

    name: str
    context_length: int
    tiers: list[str]


@page(Capability.USE_PLAYGROUND)
def playground(request: HttpRequest, me: Member) -> HttpResponse:
    """Server-rendered up to the answer; the module ``playground.js`` streams that."""
    models = _models(me)
    granted = {tier for model in models for tier in model.tiers}
    context = {
        "me": me,
        "models": models,
        "tiers": [(tier, label) for tier, label in _CLASS_OF_TIER.items() if tier in granted],
        "projects": Project.objects.order_by("name"),
        "currency": settings.RUBATO_CURRENCY,
        "budgets": budgets_of(me, QuotaPolicy.objects.order_by("priority_class")),
    }
    return render(request, "console/playground.html", context)


@page(Capability.USE_PLAYGROUND)
def ticket(request: HttpRequest, me: Member) -> HttpResponse:
    """For one socket, within half a minute, from this page's origin."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    project = get_object_or_404(Project, id=_uuid(request.POST.get("project", "")))
    wanted = tickets.Ticket(
        user_id=request.user.pk or 0,
        tenant_id=str(me.tenant.id),
        project_id=str(project.id),
        default_class=project.default_class,
        origin=request.headers.get("Origin") or f"{request.scheme}://{request.get_host()}",
        sees_money=me.may(Capability.SEE_MONEY),
    )
    try:
        return JsonResponse({"ticket": tickets.issue(wanted), "protocol": tickets.PROTOCOL})
    except BusError:
        return JsonResponse({"error": _DOWN}, status=503)


def _models(me: Member) -> list[Model]:
    """None while this process has no runtime, or no policy grants one, or all its classes are paused."""
    current = runtime.current()
    if current is None:
        return []
    caller = Caller("", "", str(me.tenant.id), "", PriorityClass.DEFAULT)
    granted = [(text, tiers) for text, tiers in current.door.models_of(caller) if tiers]
    return [Model(text.model, text.context_length, tiers) for text, tiers in granted]


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None
