"""The small world of accounts: Aurora and Stranger, each with a project and a key; what is published is kept in
lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User

from tenants import services
from tenants.models import Project, Tenant
from tenants.services import IssuedKey


@dataclass
class Account:
    """A tenant with all it owns."""

    tenant: Tenant
    project: Project
    key: IssuedKey


@dataclass
class Published:
    """What gateways would have been told, in order."""

    policies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


PUBLISHED = Published()


def publish_policy(document: dict[str, Any]) -> None:
    PUBLISHED.policies.append(document)


def publish_key(public_id: str) -> None:
    PUBLISHED.keys.append(public_id)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Published]:
    """Stands where the gateway's feed stands."""
    PUBLISHED.policies.clear()
    PUBLISHED.keys.clear()
    publishers = {"policy": publish_policy, "key": publish_key}
    real = services.import_string

    def find(path: str) -> Any:
        return publishers.get(path) or real(path)

    monkeypatch.setattr(services, "import_string", find)
    with pytest.MonkeyPatch.context() as patch:
        from django.conf import settings

        patch.setattr(settings, "RUBATO_POLICY_PUBLISHER", "policy")
        patch.setattr(settings, "RUBATO_KEY_PUBLISHER", "key")
        yield PUBLISHED


def make_account(slug: str) -> Account:
    tenant = services.create_tenant(actor="tests", slug=slug, name=slug.title())
    project = services.create_project(actor="tests", tenant=tenant, name="main")
    return Account(tenant, project, services.issue_key(actor="tests", project=project, name="first", env="test"))


@pytest.fixture
def aurora(db: None) -> Account:
    return make_account("aurora")


@pytest.fixture
def stranger(db: None) -> Account:
    return make_account("stranger")


@pytest.fixture
def operators(db: None) -> dict[str, User]:
    """Ann, Bob and Carl, who may change quotas and prices."""
    rights = Permission.objects.filter(codename__in=["change_quotapolicy", "change_price"])
    found = {name: User.objects.create_user(name, is_staff=True) for name in ("ann", "bob", "carl")}
    for user in found.values():
        user.user_permissions.set(rights)
    return found
