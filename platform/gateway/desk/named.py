"""What the desk's pages begin with: the policy in force, and tenants by their names in place of their ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.desk.door_preview import Refused
from tenants import selectors
from tenants.models import Tenant
from tenants.policy_changes import Change, Conflict, in_words


@dataclass(frozen=True, slots=True)
class Named:
    """A change, a conflict or a refusal, and its place in words."""

    place: str
    what: Change | Conflict | Refused


def named(one: Change | Conflict | Refused, names: Mapping[str, str]) -> Named:
    return Named(in_words(one.place, names), one)


def names_of_tenants() -> dict[str, str]:
    """By id."""
    return {str(tenant_id): name for tenant_id, name in Tenant.objects.values_list("id", "name")}


def policy_in_force() -> selectors.StoredPolicy:
    """Version 0 before the first edit."""
    return selectors.current_policy() or selectors.StoredPolicy(0, selectors.live_policy(0))
