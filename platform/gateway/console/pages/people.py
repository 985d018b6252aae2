"""Members and invitations of a tenant."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse

from gateway.console.pages.membership import Member, page
from gateway.console.pages.paging import shown
from gateway.console.pages.question import question
from tenants import members, rights
from tenants.forms import Once
from tenants.models import ROLE_CHOICES, Invitation, Membership
from tenants.roles import Capability, Role


class Offer(Once):
    email = forms.EmailField()
    role = forms.ChoiceField(initial="developer")

    def __init__(self, me: Member, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        role = self.fields["role"]
        assert isinstance(role, forms.ChoiceField)
        role.choices = [(value, value) for value in me.reach]


class NewRole(forms.Form):
    role = forms.ChoiceField(choices=ROLE_CHOICES)
    seen = forms.ChoiceField(choices=ROLE_CHOICES, required=False)


@page(Capability.SEE_MEMBERS, to_change=Capability.MANAGE_MEMBERS)
def people(request: HttpRequest, me: Member) -> HttpResponse:
    """Who belongs here, who is invited, and the form that invites."""
    form, link = Offer(me, request.POST if request.method == "POST" else None), ""
    if request.method == "POST" and form.is_valid():
        link = _invite(request, me, form)
    context = {
        "me": me,
        "members": shown(request, Membership.objects.order_by("created_at")),
        "invitations": shown(request, Invitation.objects.filter(ended_at=None).order_by("-created_at"), "invited"),
        "form": form if not link else Offer(me),
        "link": link,
    }
    return render(request, "console/people.html", context)


def _invite(request: HttpRequest, me: Member, form: Offer) -> str:
    try:
        email, made_id = form.cleaned_data["email"], form.cleaned_data["made_id"]
        role = Role(form.cleaned_data["role"])
        made = members.invite(actor=me.actor, tenant=me.tenant, email=email, role=role, invitation_id=made_id)
    except ValidationError as refusal:
        form.add_error("email", refusal.messages)
        return ""
    return request.build_absolute_uri(reverse("console-invitation", args=[made.token]))


@page(Capability.MANAGE_MEMBERS)
def change_role(request: HttpRequest, me: Member, member_id: uuid.UUID) -> HttpResponse:
    return _change(request, me, member_id, NewRole(request.POST))


@page(Capability.MANAGE_MEMBERS)
def remove(request: HttpRequest, me: Member, member_id: uuid.UUID) -> HttpResponse:
    """Asks, then does it."""
    if request.method == "POST":
        return _change(request, me, member_id, None)
    member = get_object_or_404(Membership, id=member_id)
    rights.require(Role(member.role), f"remove the {member.role} {member.email}")
    if member.id == me.member_id:
        asked, whom, deed = f"Give up your own membership of {me.tenant.name}?", "you", "Give it up"
    else:
        asked, whom, deed = f"Remove {member.email}?", "them", "Remove"
    lead = (
        f"Every page of {me.tenant.name} closes to {whom}, and only an invitation opens them again. Open invitations"
        f" made by {whom} end, too; keys made by {whom} go on."
    )
    return question(request, me, asked, lead=lead, deed=deed, back="console-people")


@page(Capability.MANAGE_MEMBERS)
def take_back(request: HttpRequest, me: Member, invitation_id: uuid.UUID) -> HttpResponse:
    offer = get_object_or_404(Invitation, id=invitation_id)
    if request.method == "POST":
        try:
            done = members.take_back(actor=me.actor, invitation_id=offer.id)
        except ValidationError as refusal:
            messages.error(request, " ".join(refusal.messages))
        else:
            words = "is taken back" if done else "had ended before"
            messages.success(request, f"The invitation of {offer.email} {words}.")
    return redirect("console-people", slug=me.tenant.slug)


def _change(request: HttpRequest, me: Member, member_id: uuid.UUID, form: NewRole | None) -> HttpResponse:
    """A new role, or (without a form) none any more. Who is not there is not told from who never was."""
    if request.method == "POST":
        try:
            messages.success(request, _changed(me, member_id, form))
        except Membership.DoesNotExist:
            messages.error(request, "That member is not here any more: somebody has removed them.")
        except ValidationError as refusal:
            messages.error(request, " ".join(refusal.messages))
        else:
            if form is None and member_id == me.member_id:
                return redirect("console-home")
    return redirect("console-people", slug=me.tenant.slug)


def _changed(me: Member, member_id: uuid.UUID, form: NewRole | None) -> str:
    if form is None:
        gone = members.remove(actor=me.actor, tenant_id=me.tenant.id, member_id=member_id)
        return f"{gone.email} no longer belongs to {me.tenant.name}."
    if not form.is_valid():
        raise ValidationError("choose one of the roles")
    role, seen = Role(form.cleaned_data["role"]), form.cleaned_data["seen"]
    member = members.change_role(
        actor=me.actor,
        tenant_id=me.tenant.id,
        member_id=member_id,
        role=role,
        seen=Role(seen) if seen else None,
    )
    return f"{member.email} is {member.role} now."
