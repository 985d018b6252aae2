"""A tenant's trail of changes, in words: who did what to which of its things, when, why and in which request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from gateway.console.pages.membership import Member, page
from tenants.models import AuditEvent
from tenants.news import REFUSED
from tenants.roles import Capability

EVENTS_A_PAGE = 50
_ACTIONS = {"insert": "made", "update": "changed", "delete": "removed"}
_OBJECTS = {"apikey": "key", "quotapolicy": "quota", "membership": "member", "endpoint": "webhook endpoint"}
_ENDS = {"revoked_at": "revoked", "rotated_at": "rotated", "ended_at": "ended"}
_CALLED = ("name", "email", "url", "priority_class")  # the first of them that a row has is what it is called


@dataclass(frozen=True, slots=True)
class Told:
    """An event in words. ``before`` and ``after``: (column, value) of what changed. ``note``: when it comes into force,
    where that is later than it was written.
    """

    event: AuditEvent
    what: str
    note: str
    called: str
    before: list[tuple[str, Any]]
    after: list[tuple[str, Any]]


@page(Capability.SEE_AUDIT)
def trail(request: HttpRequest, me: Member) -> HttpResponse:
    """Newest first; ``?before=`` an event's id goes on where a page ended."""
    events = AuditEvent.objects.order_by("-id")
    before = request.GET.get("before", "")
    if before.isascii() and before.isdigit() and len(before) < 19:
        events = events.filter(id__lt=int(before))
    found = list(events[: EVENTS_A_PAGE + 1])
    shown = found[:EVENTS_A_PAGE]
    names = _names(shown)
    told = [_told(event, names.get((event.object_type, event.object_id), "")) for event in shown]
    older = shown[-1].id if len(found) > EVENTS_A_PAGE else None
    return render(request, "console/trail.html", {"me": me, "events": told, "older": older})


def _names(events: Iterable[AuditEvent]) -> dict[tuple[str, str], str]:
    """By object's type and id: what the trail itself calls it, from the moment when the whole row came or went."""
    ids = {event.object_id for event in events}
    whole = AuditEvent.objects.filter(object_id__in=ids).exclude(action="update").order_by("id")
    return {(event.object_type, event.object_id): _called(event.after or event.before or {}) for event in whole}


def _called(row: dict[str, Any]) -> str:
    return next((str(row[name]) for name in _CALLED if row.get(name)), "")


def _told(event: AuditEvent, called: str) -> Told:
    """ "key rotated" rather than the row's table and columns; of a whole row its role alone is told."""
    name, action = _OBJECTS.get(event.object_type, event.object_type), _ACTIONS[event.action]
    before, after = event.before or {}, event.after or {}
    if event.action == "update":
        action = next((word for column, word in _ENDS.items() if column in after), action)
    else:
        before, after = ({"role": row["role"]} if row.get("role") else {} for row in (before, after))
    note = REFUSED if (name, action) == ("key", "revoked") else ""
    return Told(event, f"{name} {action}", note, called, list(before.items()), list(after.items()))
