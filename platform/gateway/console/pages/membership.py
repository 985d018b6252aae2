"""The way into a tenant's pages: a signed-in member, a role, the wall. Refuses to say that a foreign tenant exists."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.cache import never_cache

from gateway.console.sessions import user_of
from tenants import audit, isolation, rights
from tenants.models import Membership, Tenant
from tenants.roles import Capability, Role, covers, may


@dataclass(frozen=True, slots=True)
class Member:
    """Who looks at a tenant's page. Always: a member of it, standing inside its wall."""

    tenant: Tenant
    role: Role
    actor: str
    member_id: uuid.UUID

    def may(self, capability: Capability) -> bool:
        return may(self.role, capability)

    @property
    def reach(self) -> list[str]:
        """The roles that may do no more than this one: for templates and choices."""
        return [other.value for other in Role if covers(self.role, other)]

    @property
    def abilities(self) -> dict[str, bool]:
        """For templates: ``me.abilities.MANAGE_KEYS``."""
        return {capability.name: self.may(capability) for capability in Capability}


View = Callable[Concatenate[HttpRequest, Member, ...], HttpResponseBase]


def page(
    capability: Capability, *, to_change: Capability | None = None
) -> Callable[[View], Callable[..., HttpResponseBase]]:
    """A page of a tenant. ``capability`` opens it; a POST needs ``to_change`` (else ``capability``) too.

    Who is no member gets the 404 of a tenant that does not exist, a member of one that is switched off a 404 that says
    so; who may not gets a page that names the role. No browser keeps it: whoever goes back to it is signed in still.
    """

    def decorate(view: View) -> Callable[..., HttpResponseBase]:
        @functools.wraps(view)
        @never_cache
        @login_required
        def inside(request: HttpRequest, slug: str, *args: Any, **kwargs: Any) -> HttpResponseBase:
            me = _member(request, slug)
            if not me.tenant.is_active:
                return render(request, "console/tenant_off.html", {"tenant": me.tenant}, status=404)
            needed = (to_change or capability) if request.method == "POST" else capability
            about = audit.request(f"req_{uuid.uuid4().hex}", _reason(request))
            with isolation.tenant(me.tenant.id), rights.acting_as(me.role), about:
                if not me.may(needed):
                    return _forbidden(request, me, needed.value)
                try:
                    return view(request, me, *args, **kwargs)
                except rights.AboveOneself as refusal:
                    return _forbidden(request, me, refusal.deed)

        return inside

    return decorate


def _forbidden(request: HttpRequest, me: Member, deed: str) -> HttpResponse:
    return render(request, "console/forbidden.html", {"me": me, "needed": deed}, status=403)


def _member(request: HttpRequest, slug: str) -> Member:
    found = Membership.objects.select_related("tenant").filter(user_id=request.user.pk or 0, tenant__slug=slug)
    membership = found.first()
    if membership is None:
        raise Http404("There is no such page.")
    return Member(membership.tenant, Role(membership.role), request.user.get_username(), membership.id)


def tenant_of(session_key: str, slug: str) -> uuid.UUID | None:
    """The tenant with this slug, where who is signed in under this session is a member that may use it."""
    user = user_of(session_key)
    found = Membership.objects.filter(user_id=user.pk or 0, tenant__slug=slug, tenant__is_active=True).first()
    is_welcome = user.is_active and found is not None and may(Role(found.role), Capability.USE_PLAYGROUND)
    return found.tenant_id if found is not None and is_welcome else None


def _reason(request: HttpRequest) -> str:
    return request.POST.get("reason", "") if request.method == "POST" else ""
