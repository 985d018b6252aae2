"""What a member of a tenant may do: roles and the capabilities they hold. Pure; refuses to know who holds a role."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """Always: exactly one per member and tenant; an owner can do everything, and a tenant keeps at least one."""

    OWNER = "owner"
    ADMIN = "admin"
    BILLING = "billing"
    DEVELOPER = "developer"
    AUDITOR = "auditor"


class Capability(enum.StrEnum):
    """One thing a page or a route asks for."""

    SEE_USAGE = "see usage"
    SEE_MONEY = "see statements and prices"
    SEE_AUDIT = "see the audit trail"
    SEE_MEMBERS = "see members"
    USE_PLAYGROUND = "use the playground, files and batches"
    MANAGE_KEYS = "make, rotate and revoke keys"
    MANAGE_PROJECTS = "make and edit projects"
    MANAGE_MEMBERS = "invite and remove members"
    MANAGE_OWNERS = "make and unmake owners"
    MANAGE_WEBHOOKS = "edit alerts and webhooks"


_EVERYBODY = {Capability.SEE_USAGE, Capability.SEE_MEMBERS}
_DEVELOPER = _EVERYBODY | {Capability.USE_PLAYGROUND, Capability.MANAGE_KEYS, Capability.MANAGE_WEBHOOKS}

CAPABILITIES: dict[Role, frozenset[Capability]] = {
    Role.OWNER: frozenset(Capability),
    Role.ADMIN: frozenset(Capability) - {Capability.MANAGE_OWNERS},
    Role.BILLING: frozenset(_EVERYBODY | {Capability.SEE_MONEY}),
    Role.DEVELOPER: frozenset(_DEVELOPER),
    Role.AUDITOR: frozenset(_EVERYBODY | {Capability.SEE_MONEY, Capability.SEE_AUDIT}),
}


def may(role: Role | None, capability: Capability) -> bool:
    """False for somebody who is no member."""
    return role is not None and capability in CAPABILITIES[role]


def covers(role: Role, other: Role) -> bool:
    """Whether ``role`` may do all that ``other`` may."""
    return CAPABILITIES[other] <= CAPABILITIES[role]
