"""The policy desk's door: who may open its pages, and the reason that comes with a form. Knows no page."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from django.contrib.admin.views.decorators import staff_member_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache

from tenants import audit

View = Callable[..., HttpResponse]


def operator(*rights: str) -> Callable[[View], View]:
    """Staff who hold any one of ``rights``; every change is on record with a request id."""

    def guarded(view: View) -> View:
        def inside(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not any(request.user.has_perm(right) for right in rights):
                raise PermissionDenied
            with audit.request(f"req_{uuid.uuid4().hex}", reason_of(request)):
                return view(request, *args, **kwargs)

        return never_cache(staff_member_required(inside))

    return guarded


def reason_of(request: HttpRequest) -> str:
    return audit.kept(request.POST.get("reason", ""))
