"""People of a tenant, signed in."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.test import Client

from tenants import members
from tenants.models import Tenant
from tenants.roles import Role


def signed_in(user: User) -> Client:
    """The browser of somebody who has an account."""
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def person(tenant: Tenant, role: Role | None, name: str = "") -> Client:
    """Somebody new, a member where they have a role; called by role and tenant unless ``name`` says otherwise."""
    name = name or f"{role}-of-{tenant.slug}"
    user = User.objects.create_user(name, f"{name}@{tenant.slug}.example", "a long enough one")
    if role is not None:
        members.add_member(actor="tests", tenant=tenant, user=user, email=user.email, role=role)
    return signed_in(user)
