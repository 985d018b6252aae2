"""How people get accounts: behind an invitation, or from an operator. Nobody signs up by themselves."""

from __future__ import annotations

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest


class InvitedOnly(DefaultAccountAdapter):  # type: ignore[misc]  # allauth brings no types
    """Always: the sign-up page is closed."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False
