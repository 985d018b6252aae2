"""Webhooks of a tenant: endpoints, their secrets, what was told to them; what was given up can be sent once more."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from gateway.console.pages.membership import Member, page
from gateway.console.pages.question import question
from gateway.webhooks import services
from gateway.webhooks.models import Delivery, Endpoint
from gateway.webhooks.signing import secret_of
from tenants.forms import Once, whole_number
from tenants.refusals import StillGood
from tenants.roles import Capability

SHOWN = 50
_DEEDS: dict[str, tuple[Callable[[str, uuid.UUID, QueryDict], bool], str]] = {
    "rotate": (
        lambda actor, it, given: services.rotate(
            actor=actor,
            endpoint_id=it,
            seen=whole_number(given.get("seen", "")),
            end_previous="end_previous" in given,
        ),
        "It has a new secret; for a day the old one signs too.",
    ),
    "off": (
        lambda actor, it, _: services.switch(actor=actor, endpoint_id=it, is_active=False),
        "Nothing is told to it for now.",
    ),
    "on": (
        lambda actor, it, _: services.switch(actor=actor, endpoint_id=it, is_active=True),
        "It is told what happened meanwhile, up to a day back, and what happens from now on.",
    ),
    "remove": (lambda actor, it, _: services.remove(actor=actor, endpoint_id=it), "It is gone, with its deliveries."),
}


class NewEndpoint(Once):
    url = forms.CharField(label="address", max_length=500, help_text="https://, and reachable from the open network")
    events = forms.MultipleChoiceField(widget=forms.CheckboxSelectMultiple, label="told of")

    def __init__(self, me: Member, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        events = self.fields["events"]
        assert isinstance(events, forms.MultipleChoiceField)
        events.choices = [(event, event) for event in services.events_for(me.tenant)]


@page(Capability.MANAGE_WEBHOOKS)
def webhooks(request: HttpRequest, me: Member) -> HttpResponse:
    """The list, the form, and the newest deliveries."""
    form = NewEndpoint(me, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            given = form.cleaned_data
            made_id, url, events = given["made_id"], given["url"], given["events"]
            services.add(actor=me.actor, tenant=me.tenant, url=url, events=events, endpoint_id=made_id)
        except ValidationError as refusal:
            form.add_error(None, refusal)
        else:
            messages.success(request, "It is told what happens from now on.")
            return redirect("console-webhooks", slug=me.tenant.slug)
    endpoints = [(one, secret_of(one.id, one.secret_number)) for one in Endpoint.objects.all()]
    deliveries = list(_before(request)[: SHOWN + 1])
    context = {
        "me": me,
        "endpoints": endpoints,
        "deliveries": deliveries[:SHOWN],
        "older": deliveries[SHOWN - 1].id if len(deliveries) > SHOWN else None,
        "form": form,
    }
    return render(request, "console/webhooks.html", context)


def _before(request: HttpRequest) -> QuerySet[Delivery]:
    """Newest first; ``?before=`` the id of a delivery goes on where a page ended."""
    found = Delivery.objects.select_related("endpoint")
    try:
        return found.filter(id__lt=uuid.UUID(request.GET["before"]))
    except (KeyError, ValueError):
        return found


@page(Capability.MANAGE_WEBHOOKS)
def change(request: HttpRequest, me: Member, endpoint_id: str, deed: str) -> HttpResponse:
    """One of ``rotate``, ``off``, ``on``, ``remove``: the last asks, and so does a rotation that would end a secret
    before its time.
    """
    if request.method != "POST":
        return _ask(request, me, endpoint_id) if deed == "remove" else HttpResponseNotAllowed(["POST"])
    do, words = _DEEDS[deed]
    try:
        done = do(me.actor, uuid.UUID(endpoint_id), request.POST)
    except StillGood as refusal:
        sent = {"seen": request.POST.get("seen", ""), "end_previous": "on"}
        asked, deed = "Rotate the secret once more, and end the former one now?", "Rotate, and end the former one now"
        lead = " ".join(refusal.messages)
        return question(request, me, asked, lead=lead, deed=deed, sent=sent, back="console-webhooks")
    except ValueError:  # 36 characters that are no id
        done = False
    why = "There is no such endpoint, or it has a newer secret than this page showed."
    return _said(request, me, done, words, why if deed == "rotate" else "There is no such endpoint.")


def _ask(request: HttpRequest, me: Member, endpoint_id: str) -> HttpResponse:
    try:
        endpoint = get_object_or_404(Endpoint, id=endpoint_id)
    except ValidationError as refusal:  # 36 characters that are no id
        raise Http404 from refusal
    told = Delivery.objects.filter(endpoint=endpoint)
    on_their_way = told.filter(state=Delivery.State.PENDING).count()
    lead = f"With it go its deliveries: {told.count()}, of which {on_their_way} are on their way and will not arrive."
    return question(request, me, f"Remove {endpoint.url}?", lead=lead, deed="Remove", back="console-webhooks")


@require_POST
@page(Capability.MANAGE_WEBHOOKS)
def replay(request: HttpRequest, me: Member, delivery_id: uuid.UUID) -> HttpResponse:
    """Under the same id, so that a receiver that has it already can tell."""
    done = services.replay(actor=me.actor, delivery_id=delivery_id)
    return _said(request, me, done, "It is sent once more.", "There is nothing to send once more.")


def _said(request: HttpRequest, me: Member, done: bool, words: str, refusal: str) -> HttpResponse:
    if done:
        messages.success(request, words)
    else:
        messages.error(request, refusal)
    return redirect("console-webhooks", slug=me.tenant.slug)
