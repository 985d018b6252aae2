"""The tenant console's small world: Aurora with one of everything, and what a page says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.test import Client
from django.utils import timezone

from billing import services as billing_services
from billing import statements
from tenants import members, services
from tenants.models import Membership
from tenants.roles import Role
from tests.gateway.people import person

MADE_ID = "00000000-0000-4000-8000-000000000001"


class House:
    """Aurora with one of everything, and a person of each role."""

    def __init__(self) -> None:
        self.tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.key = services.issue_key(actor="tests", project=self.project, name="app", env="test").key
        billing_services.credit(actor="tests", tenant_id=self.tenant.id, amount_micros=5, reason="hello")
        (self.statement,) = statements.close_due_days(timezone.now() + timedelta(days=2))
        self.people = {role: self.person(role.value, role) for role in Role}
        self.member = Membership.objects.get(role="developer")
        offer = members.invite(actor="tests", tenant=self.tenant, email="bob@aurora.example", role=Role.AUDITOR)
        self.invitation, self.token = offer.invitation, offer.token

    def person(self, name: str, role: Role | None) -> Client:
        return person(self.tenant, role, name)

    def at(self, page: str) -> str:
        ids = {
            "project": self.project.id,
            "key": self.key.id,
            "statement": self.statement.id,
            "member": self.member.id,
            "invitation": self.invitation.id,
        }
        return f"/console/aurora/{page.format(**ids)}"


def open_house(settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # a slow hash is not what is tried
    return House()


def text_of(answer: Any) -> str:
    return str(answer.content.decode())
