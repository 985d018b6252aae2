"""API keys of a tenant: made and shown once, rotated with a grace, revoked; and the projects they belong to."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.html import format_html

from gateway.console.pages.membership import Member, page
from gateway.console.pages.paging import shown
from gateway.console.pages.question import question
from gateway.console.templatetags.times import moment
from scheduler_engine.policy import PriorityClass
from tenants import isolation, services
from tenants.forms import Name, Once, WholeNumber
from tenants.models import CLASS_CHOICES, ApiKey, Project
from tenants.news import REFUSED, News
from tenants.refusals import StillGood
from tenants.roles import Capability, Role

GRACES = [("0", "none: the old secret ends now"), ("3600", "an hour"), ("86400", "a day"), ("604800", "a week")]


class ByName(forms.ModelChoiceField):  # type: ignore[type-arg]
    """A choice of projects, called by their names alone."""

    def label_from_instance(self, obj: Any) -> str:
        return str(obj.name)


class NewKey(Once):
    name = Name(max_length=120, help_text="what will use it: shown in usage and on the trail")
    project = ByName(Project.objects.none(), empty_label=None)
    role = forms.ChoiceField(
        choices=[("", "inference")],
        required=False,
        label="opens",
        help_text="inference, or the management API with the rights of a role",
    )
    days = WholeNumber(
        min_value=1, max_value=3_650, required=False, label="ends after (days)", help_text="empty = never"
    )

    def __init__(self, me: Member, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        project, role = self.fields["project"], self.fields["role"]
        assert isinstance(project, forms.ModelChoiceField)
        assert isinstance(role, forms.ChoiceField)
        project.queryset = Project.objects.order_by("name")
        role.choices = [("", "inference"), *((value, f"management, as {value}") for value in me.reach)]


class NewProject(forms.Form):
    name = Name(max_length=120)
    default_class = forms.ChoiceField(
        choices=CLASS_CHOICES, initial="default", help_text="used when a call names no tier"
    )


class Rotation(forms.Form):
    seen = forms.CharField(max_length=4, required=False, widget=forms.HiddenInput)
    grace = forms.ChoiceField(choices=GRACES, initial="86400", label="the old secret goes on for")
    end_previous = forms.BooleanField(required=False, widget=forms.CheckboxInput(attrs={"required": True}))

    def __init__(self, key: ApiKey, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if until := key.previous_good_until:
            self.fields["grace"].label = f"the secret …{key.last4} goes on for"
            words = "end the secret …{} now, which was to open until {}"
            self.fields["end_previous"].label = format_html(words, key.previous_last4, moment(until))
        else:
            del self.fields["end_previous"]


@page(Capability.SEE_USAGE, to_change=Capability.MANAGE_KEYS)
def keys(request: HttpRequest, me: Member) -> HttpResponse:
    """The list, and the form that makes one."""
    form = NewKey(me, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        days = form.cleaned_data["days"]
        try:
            issued = services.issue_key(
                actor=me.actor,
                project=form.cleaned_data["project"],
                name=form.cleaned_data["name"],
                env=settings.RUBATO_KEY_ENVIRONMENT,
                expires_at=timezone.now() + timedelta(days=days) if days else None,
                role=Role(form.cleaned_data["role"]) if form.cleaned_data["role"] else None,
                key_id=form.cleaned_data["made_id"],
            )
        except ValidationError as refusal:
            lost = "Its secret was shown once: where it is not at hand, revoke the key and make another."
            messages.error(request, " ".join([*refusal.messages, lost]))
            return redirect("console-keys", slug=me.tenant.slug)
        return _show_once(request, me, issued, "made")
    newest_first = ApiKey.objects.select_related("project").order_by(
        F("revoked_at").desc(nulls_first=True), "-created_at"
    )
    context = {"me": me, "keys": shown(request, newest_first), "form": form}
    return render(request, "console/keys.html", context)


@page(Capability.MANAGE_KEYS)
def rotate(request: HttpRequest, me: Member, key_id: uuid.UUID) -> HttpResponse:
    """Asks for the grace, then shows the new secret once."""
    key = get_object_or_404(ApiKey, id=key_id)
    services.require_rotatable(key)
    if key.has_ended:
        messages.error(request, f"{key.name} has ended, and cannot be rotated: make a new key.")
        return redirect("console-keys", slug=me.tenant.slug)
    form = Rotation(key, request.POST if request.method == "POST" else None, initial={"seen": key.last4})
    if request.method == "POST" and form.is_valid():
        grace = timedelta(seconds=int(form.cleaned_data["grace"]))
        try:
            issued = services.rotate_key(
                actor=me.actor,
                key_id=key.id,
                env=settings.RUBATO_KEY_ENVIRONMENT,
                grace=grace,
                expected_last4=form.cleaned_data["seen"] or None,
                end_previous=form.cleaned_data.get("end_previous", False),
            )
        except StillGood as refusal:
            form.add_error(None, refusal)
        except ValidationError as refusal:
            messages.error(request, " ".join(refusal.messages))
            return redirect("console-keys", slug=me.tenant.slug)
        else:
            return _show_once(request, me, issued, "rotated")
    return render(request, "console/rotate.html", {"me": me, "key": key, "form": form})


@page(Capability.MANAGE_KEYS)
def revoke(request: HttpRequest, me: Member, key_id: uuid.UUID) -> HttpResponse:
    """Asks, then ends the key for good."""
    key = get_object_or_404(ApiKey, id=key_id)
    if request.method != "POST":
        lead = f"It opens nothing any more, for good: {REFUSED}. Calls that run end, too."
        return question(request, me, f"Revoke {key.name}?", lead=lead, deed="Revoke", back="console-keys")
    if news := services.revoke_key(actor=me.actor, key_id=key.id):
        transaction.on_commit(lambda: _say(request, key, news), using=isolation.ALIAS)
    else:
        messages.success(request, f"{key.name} had ended before.")
    return redirect("console-keys", slug=me.tenant.slug)


@page(Capability.SEE_USAGE, to_change=Capability.MANAGE_PROJECTS)
def projects(request: HttpRequest, me: Member) -> HttpResponse:
    """The list, and the form that makes one."""
    form = NewProject(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        label = PriorityClass.from_label(form.cleaned_data["default_class"])
        try:
            services.create_project(
                actor=me.actor, tenant=me.tenant, name=form.cleaned_data["name"], default_class=label
            )
        except ValidationError as refusal:
            form.add_error("name", refusal.messages)
        else:
            messages.success(request, f"Project {form.cleaned_data['name']} is there.")
            return redirect("console-projects", slug=me.tenant.slug)
    found = shown(request, Project.objects.order_by("name"))
    return render(request, "console/projects.html", {"me": me, "projects": found, "form": form})


def _show_once(request: HttpRequest, me: Member, issued: services.IssuedKey, what: str) -> HttpResponse:
    """Rendered behind the transaction: by then it is known whether gateways were told."""
    return TemplateResponse(request, "console/key_once.html", {"me": me, "issued": issued, "what": what})


def _say(request: HttpRequest, key: ApiKey, news: News) -> None:
    level = messages.SUCCESS if news.is_told else messages.ERROR
    messages.add_message(request, level, news.of_the_end_of(key.name))
