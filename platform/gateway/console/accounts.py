"""How people get accounts: behind an invitation, or from an operator. Nobody signs up by themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.internal import ratelimit
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


class InvitedOnly(DefaultAccountAdapter):  # type: ignore[misc]  # allauth brings no types
    """Always: the sign-up page is closed, and wrong passwords close a name to nobody but the address they come from."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        """What failed sign-ins are counted by, beside the address alone."""
        name = super()._get_login_attempts_cache_key(request, **credentials)
        return f"{name}@{ratelimit.get_ip(request)}"


def by_mail(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """A page that promises a mail. Where the platform sends none, it says so, and who helps instead."""

    @functools.wraps(view)
    def inside(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return view(request, *args, **kwargs) if settings.EMAIL_HOST else render(request, "account/no_mail.html")

    return inside
