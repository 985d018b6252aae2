"""The page that asks before something is done that cannot be undone."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from gateway.console.pages.membership import Member


def question(
    request: HttpRequest, me: Member, asked: str, *, lead: str, deed: str, back: str, sent: dict[str, str] | None = None
) -> HttpResponse:
    """A form that posts to the address it was asked for: ``deed`` is its button, ``sent`` its hidden fields. ``back``:
    the page of the tenant, by name, to which *Leave it* leads.
    """
    context = {"me": me, "question": asked, "lead": lead, "deed": deed, "sent": sent or {}}
    return render(request, "console/question.html", context | {"back": reverse(back, args=[me.tenant.slug])})
