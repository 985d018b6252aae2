"""Who is signed in, outside of Django's own requests. Refuses to know what they may."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest


def user_of(session_key: str) -> AbstractBaseUser | AnonymousUser:
    """Read afresh from the database."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key or None)
    return get_user(request)
