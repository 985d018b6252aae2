"""Who is signed in, for pages and outside of Django's own requests. Refuses to know what they may."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.auth import SESSION_KEY, get_user
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest
from django.utils.crypto import salted_hmac


def user_of(session_key: str) -> AbstractBaseUser | AnonymousUser:
    """Read afresh from the database."""
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key or None)
    return get_user(request)


def sign_in(request: HttpRequest) -> dict[str, str]:
    """For templates: a name of this sign-in that opens nothing; another person's differs, and the same one's next."""
    session = getattr(request, "session", None)
    if session is None:
        return {}
    is_signed_in = SESSION_KEY in session
    return {"sign_in": salted_hmac("sign-in", session.session_key).hexdigest()[:32] if is_signed_in else "nobody"}
