"""The management API's routes, and a tenant with one of everything who calls them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from billing import ledger, statements
from billing import services as billing_services
from billing.messages import Reservation, Settlement
from billing.pricing import Terminal, TokenCounts, TokenPrices
from tenants import members, services
from tenants.roles import Capability, Role
from tests.gateway.people import signed_in

ROOT = "/v1/organization"
PRICES = {("m", "default"): TokenPrices(prompt=1_000_000, cached=1_000_000, output=2_000_000)}
ROUTES = [
    ("GET", "projects", Capability.SEE_USAGE),
    ("POST", "projects", Capability.MANAGE_PROJECTS),
    ("GET", "projects/{project}", Capability.SEE_USAGE),
    ("POST", "projects/{project}", Capability.MANAGE_PROJECTS),
    ("GET", "projects/{project}/api_keys", Capability.SEE_USAGE),
    ("POST", "projects/{project}/api_keys", Capability.MANAGE_KEYS),
    ("GET", "api_keys/{key}", Capability.SEE_USAGE),
    ("DELETE", "api_keys/{key}", Capability.MANAGE_KEYS),
    ("POST", "api_keys/{key}/rotate", Capability.MANAGE_KEYS),
    ("GET", "users", Capability.SEE_MEMBERS),
    ("GET", "users/{member}", Capability.SEE_MEMBERS),
    ("POST", "users/{member}", Capability.MANAGE_MEMBERS),
    ("DELETE", "users/{member}", Capability.MANAGE_MEMBERS),
    ("GET", "invites", Capability.SEE_MEMBERS),
    ("POST", "invites", Capability.MANAGE_MEMBERS),
    ("DELETE", "invites/{invite}", Capability.MANAGE_MEMBERS),
    ("GET", "audit_logs", Capability.SEE_AUDIT),
    ("GET", "usage/completions?start_time=1", Capability.SEE_USAGE),
    ("GET", "usage/export", Capability.SEE_MONEY),
    ("GET", "costs?start_time=1", Capability.SEE_MONEY),
    ("GET", "statements", Capability.SEE_MONEY),
    ("GET", "statements/{statement}", Capability.SEE_MONEY),
]
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "projects"): {"name": "a second one"},
    ("POST", "projects/{project}"): {"name": "main", "default_class": "batch"},
    ("POST", "projects/{project}/api_keys"): {"name": "ci", "role": "auditor"},
    ("POST", "api_keys/{key}/rotate"): {"grace_seconds": 60},
    ("POST", "users/{member}"): {"role": "admin"},
    ("POST", "invites"): {"email": "new@aurora.example", "role": "billing"},
}
NAMED = [(method, route) for method, route, _ in ROUTES if "{" in route]


class House:
    """One tenant with one of everything, and a management key of each role."""

    def __init__(self, slug: str, price_version: int) -> None:
        self.price_version = price_version
        self.tenant = services.create_tenant(actor="tests", slug=slug, name=slug.title())
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.key = services.issue_key(actor="tests", project=self.project, name="app", env="test")
        user = User.objects.create_user(f"{slug}-ann", f"ann@{slug}.example", "x")
        self.member = members.add_member(
            actor="tests", tenant=self.tenant, user=user, email=user.email, role=Role.DEVELOPER
        )
        offer = members.invite(actor="tests", tenant=self.tenant, email=f"bob@{slug}.example", role=Role.AUDITOR)
        self.invite = offer.invitation
        self.spend()
        close_at = timezone.now() + timedelta(days=2)
        (self.statement,) = [one for one in statements.close_due_days(close_at) if one.tenant_id == self.tenant.id]
        self._keys: dict[Role, str] = {}

    def spend(self, terminal: Terminal = Terminal.COMPLETED) -> None:
        """3 prompt and 2 output tokens: 7 micro-units where they are charged."""
        same = {
            "operation_id": uuid.uuid4(),
            "tenant_id": self.tenant.id,
            "project_id": self.project.id,
            "key_id": self.key.key.id,
            "priority_class": "default",
            "model": "m",
            "policy_version": 1,
            "price_version": self.price_version,
        }
        reserve = Reservation(source="rest", money_micros=99, reserved_tokens=9, window_id="2026-11", **same)
        usage = Settlement(attempt=1, counts=TokenCounts(3, 0, 2), terminal=terminal, **same)
        ledger.apply([reserve, usage])

    def management_key(self, role: Role) -> str:
        if role not in self._keys:
            issued = services.issue_key(actor="tests", project=self.project, name=role, env="test", role=role)
            self._keys[role] = issued.text
        return self._keys[role]

    def ids(self) -> dict[str, str]:
        objects = {
            "project": self.project,
            "key": self.key.key,
            "member": self.member,
            "invite": self.invite,
            "statement": self.statement,
        }
        return {name: str(one.pk) for name, one in objects.items()}


def open_houses(settings: Any) -> dict[str, House]:
    """Two of them, with prices, and passwords that are quick to hash."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    version = billing_services.set_prices(actor="tests", prices=PRICES).version
    return {slug: House(slug, version) for slug in ("aurora", "stranger")}


def call(text: str | None, method: str, route: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
    sent = {**(headers or {}), **({} if text is None else {"Authorization": f"Bearer {text}"})}
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return Client(enforce_csrf_checks=True).generic(
        method, f"{ROOT}/{route}", content, "application/json", headers=sent
    )


def whole(answer: Any) -> bytes:
    """The content, also of an answer that is sent in pieces."""

    async def joined() -> bytes:
        return b"".join([piece async for piece in answer])

    return async_to_sync(joined)() if answer.streaming else bytes(answer.content)


def error(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def as_owner(house: House, method: str, route: str, body: Any = None) -> Any:
    return call(house.management_key(Role.OWNER), method, route, body)


def of_owner_and_operator(house: House) -> Client:
    """The browser of somebody who owns the tenant and runs the platform."""
    house.member.role = "owner"
    house.member.save()
    user = house.member.user
    user.is_staff = user.is_superuser = True
    user.save()
    return signed_in(user)
