"""The doors: which tenant, which account an operator needs, and the page behind an invitation's link."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth import REDIRECT_FIELD_NAME, get_user_model, login
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from tenants import members
from tenants.models import Invitation, Membership
from tenants.user_names import free_name

BACKEND = "django.contrib.auth.backends.ModelBackend"
TAKEN = "this name is taken; if it is yours, sign in first and open the link again"


@require_safe
@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Straight to the only tenant that is not switched off, or a choice. Operators who belong to none: to the board."""
    mine = Membership.objects.select_related("tenant").filter(user_id=request.user.pk or 0)
    found = list(mine.order_by("tenant__name"))
    is_open = [one for one in found if one.tenant.is_active]
    if len(is_open) == 1:
        return redirect("console", slug=is_open[0].tenant.slug)
    if not found and request.user.is_staff:
        return redirect("live")
    return render(request, "console/home.html", {"memberships": found})


@never_cache
def operators_door(request: HttpRequest) -> HttpResponse:
    """Where operators' pages send whoever may not see them: the one log-in, and afterwards back.

    Somebody who is signed in and no operator is told so: the log-in would only send them round.
    """
    wanted = request.GET.get(REDIRECT_FIELD_NAME, "")
    if not url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure()):
        wanted = reverse("admin:index")
    if request.user.is_authenticated and not request.user.is_staff:
        return render(request, "operator/for_operators.html", status=403)
    if request.user.is_authenticated:
        return redirect(wanted)
    return redirect_to_login(wanted)


class NewPerson(forms.Form):
    """A person who has no account yet; the address is the invitation's. A name that is an address is that one."""

    username = forms.CharField(
        max_length=150, help_text="what others read beside all that you do: letters a to z, digits and . @ + - _"
    )
    password = forms.CharField(
        widget=forms.PasswordInput, help_text="at least eight characters, and none of the common ones"
    )

    def __init__(self, offer: Invitation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._email = offer.email

    def clean_username(self) -> str:
        username = str(self.cleaned_data["username"])
        free_name(username, taken=TAKEN)
        if "@" in username and username.lower() != self._email.lower():
            raise ValidationError("a name that is an address must be the one that you are invited under")
        return username

    def clean_password(self) -> str:
        password = str(self.cleaned_data["password"])
        validate_password(password)
        return password


@never_cache
@require_http_methods(["GET", "POST"])
def invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Joins a signed-in reader; makes an account for anybody else, and none for who comes too late to join by it."""
    offer = members.find_invitation(token)
    if offer is None:
        return _ended(request)
    if request.user.is_authenticated:
        return _join(request, offer, token) if request.method == "POST" else _offer(request, offer, None)
    form = NewPerson(offer, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            user = _joined(offer, token, **form.cleaned_data)
        except ValidationError as refusal:
            if members.find_invitation(token) is None:
                return _ended(request)
            form.add_error("username", refusal.messages)
        else:
            login(request, user, backend=BACKEND)
            return _welcome(request, offer)
    return _offer(request, offer, form)


def _joined(offer: Invitation, token: str, username: str, password: str) -> User:
    """A new person, who is a member. Raises ValidationError: there is neither then."""
    with transaction.atomic():
        free_name(username, taken=TAKEN)  # who was given it since the form looked
        user: User = get_user_model().objects.create_user(username=username, email=offer.email, password=password)
        members.accept(token=token, user=user)
    return user


def _ended(request: HttpRequest) -> HttpResponse:
    return render(request, "console/invitation_ended.html", status=404)


def _offer(request: HttpRequest, offer: Invitation, form: NewPerson | None) -> HttpResponse:
    return render(request, "console/invitation.html", {"offer": offer, "form": form})


def _join(request: HttpRequest, offer: Invitation, token: str) -> HttpResponse:
    assert request.user.is_authenticated
    try:
        members.accept(token=token, user=request.user)
    except ValidationError as refusal:
        messages.error(request, " ".join(refusal.messages))
        return redirect("console-home")
    return _welcome(request, offer)


def _welcome(request: HttpRequest, offer: Invitation) -> HttpResponse:
    messages.success(request, f"You belong to {offer.tenant.name} now, as {offer.role}.")
    return redirect("console", slug=offer.tenant.slug)
