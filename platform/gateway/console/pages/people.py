"""Members and invitations of a tenant, and its trail of changes."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache

from gateway.console.pages.membership import Member, page
from gateway.console.pages.paging import shown
from tenants import members
from tenants.models import ROLE_CHOICES, AuditEvent, Invitation, Membership
from tenants.roles import Capability, Role

EVENTS_A_PAGE = 50
_ACTIONS = {"insert": "made", "update": "changed", "delete": "removed"}
_OBJECTS = {"apikey": "key", "quotapolicy": "quota", "membership": "member"}


class Offer(forms.Form):
    email = forms.EmailField()
    role = forms.ChoiceField(choices=ROLE_CHOICES, initial="developer")


class NewRole(forms.Form):
    role = forms.ChoiceField(choices=ROLE_CHOICES)


@never_cache
@page(Capability.SEE_MEMBERS, to_change=Capability.MANAGE_MEMBERS)
def people(request: HttpRequest, me: Member) -> HttpResponse:
    """Who belongs here, who is invited, and the form that invites."""
    form, link = Offer(request.POST if request.method == "POST" else None), ""
    if request.method == "POST" and form.is_valid():
        role = Role(form.cleaned_data["role"])
        if role is Role.OWNER and not me.may(Capability.MANAGE_OWNERS):
            form.add_error("role", "only an owner makes owners")
        else:
            link = _invite(request, me, form, role)
    context = {
        "me": me,
        "members": shown(request, Membership.objects.order_by("created_at")),
        "invitations": shown(request, Invitation.objects.filter(ended_at=None).order_by("-created_at"), "invited"),
        "form": form if not link else Offer(),
        "link": link,
        "roles": [value for value, _ in ROLE_CHOICES],
    }
    return render(request, "console/people.html", context)


def _in_words(event: AuditEvent) -> str:
    """ "key rotated" rather than the row's table and columns."""
    name = _OBJECTS.get(event.object_type, event.object_type)
    changed = event.after or {}
    if event.action == "update" and "revoked_at" in changed:
        return f"{name} revoked"
    if event.action == "update" and "rotated_at" in changed:
        return f"{name} rotated"
    if event.action == "update" and "ended_at" in changed:
        return f"{name} ended"
    return f"{name} {_ACTIONS[event.action]}"


def _told(event: AuditEvent, columns: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """(column, value) of what changed; of a whole row that came or went what it is called, and its role."""
    if columns is None:
        return []
    if event.action == "update":
        return list(columns.items())
    called = columns.get("name") or columns.get("email")
    role = columns.get("role")
    return [("", called)] * bool(called) + [("role", role)] * bool(role)


def _invite(request: HttpRequest, me: Member, form: Offer, role: Role) -> str:
    try:
        made = members.invite(actor=me.actor, tenant=me.tenant, email=form.cleaned_data["email"], role=role)
    except ValidationError as refusal:
        form.add_error("email", refusal.messages)
        return ""
    return request.build_absolute_uri(reverse("console-invitation", args=[made.token]))


@page(Capability.MANAGE_MEMBERS)
def change_role(request: HttpRequest, me: Member, member_id: uuid.UUID) -> HttpResponse:
    return _change(request, me, member_id, NewRole(request.POST))


@page(Capability.MANAGE_MEMBERS)
def remove(request: HttpRequest, me: Member, member_id: uuid.UUID) -> HttpResponse:
    return _change(request, me, member_id, None)


@page(Capability.MANAGE_MEMBERS)
def take_back(request: HttpRequest, me: Member, invitation_id: uuid.UUID) -> HttpResponse:
    offer = get_object_or_404(Invitation, id=invitation_id)
    if request.method == "POST":
        members.take_back(actor=me.actor, invitation_id=offer.id)
        messages.success(request, f"The invitation of {offer.email} is taken back.")
    return redirect("console-people", slug=me.tenant.slug)


def _change(request: HttpRequest, me: Member, member_id: uuid.UUID, form: NewRole | None) -> HttpResponse:
    """A new role, or (without a form) none any more."""
    member = get_object_or_404(Membership, id=member_id)
    if request.method == "POST":
        try:
            messages.success(request, _changed(me, member, form))
        except ValidationError as refusal:
            messages.error(request, " ".join(refusal.messages))
    return redirect("console-people", slug=me.tenant.slug)


def _changed(me: Member, member: Membership, form: NewRole | None) -> str:
    if form is not None and not form.is_valid():
        raise ValidationError("choose one of the roles")
    role = None if form is None else Role(form.cleaned_data["role"])
    if Role.OWNER in (member.role, role) and not me.may(Capability.MANAGE_OWNERS):
        raise ValidationError("only an owner makes and unmakes owners")
    if role is None:
        members.remove(actor=me.actor, tenant_id=me.tenant.id, member_id=member.id)
        return f"{member.email} no longer belongs to {me.tenant.name}."
    members.change_role(actor=me.actor, tenant_id=me.tenant.id, member_id=member.id, role=role)
    return f"{member.email} is {role.value} now."


@page(Capability.SEE_AUDIT)
def trail(request: HttpRequest, me: Member) -> HttpResponse:
    """Newest first; ``?before=`` an event's id goes on where a page ended."""
    events = AuditEvent.objects.order_by("-id")
    before = request.GET.get("before", "")
    if before.isascii() and before.isdigit() and len(before) < 19:
        events = events.filter(id__lt=int(before))
    found = list(events[: EVENTS_A_PAGE + 1])
    shown = found[:EVENTS_A_PAGE]
    for event in shown:
        event.what = _in_words(event)  # type: ignore[attr-defined]  # these three for the template alone
        event.told_before = _told(event, event.before)  # type: ignore[attr-defined]
        event.told_after = _told(event, event.after)  # type: ignore[attr-defined]
    older = shown[-1].id if len(found) > EVENTS_A_PAGE else None
    return render(request, "console/trail.html", {"me": me, "events": shown, "older": older})
