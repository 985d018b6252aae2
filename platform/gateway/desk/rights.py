"""Who may do what at the policy desk: one right is for the policy, one for prices. Knows no page."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from django.contrib.admin.views.decorators import staff_member_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache

from tenants import audit
from tenants.policy_changes import Change

MAY_EDIT_POLICY = "tenants.change_quotapolicy"
MAY_EDIT_PRICES = "billing.change_price"

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


def needed_for(edit: Sequence[Change], prices: Sequence[Change]) -> dict[str, str]:
    """The rights that an edit of these changes asks for, each with the word for what it is about."""
    needed = {MAY_EDIT_POLICY: "quotas"} if edit or not prices else {}
    return needed | ({MAY_EDIT_PRICES: "prices"} if prices else {})


def reason_of(request: HttpRequest) -> str:
    """As much of it as is kept; no text of the database holds a NUL."""
    return request.POST.get("reason", "")[: audit.LONGEST_REASON].replace("\0", "")
