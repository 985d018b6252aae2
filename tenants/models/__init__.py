"""Who may use the platform and under what policy, as rows. Knows constraints; refuses to know how anything is changed
(services).

Row-level security binds every table with a ``tenant_id`` (and ``tenants_tenant`` itself): see ``migrations/0002``.
"""

from tenants.models.accounts import ApiKey, AuditEvent, Invitation, Membership, Project, Tenant, known_timezone
from tenants.models.policy import (
    DEFAULT_ABOVE_CAP,
    MAX_TOKENS_DEFAULT,
    PolicyProposal,
    PolicyVersion,
    PriorityClass,
    QuotaPolicy,
)
from tenants.models.words import CLASS_CHOICES, CLASS_LABELS, ROLE_CHOICES

__all__ = [
    "CLASS_CHOICES",
    "CLASS_LABELS",
    "DEFAULT_ABOVE_CAP",
    "MAX_TOKENS_DEFAULT",
    "ROLE_CHOICES",
    "ApiKey",
    "AuditEvent",
    "Invitation",
    "Membership",
    "PolicyProposal",
    "PolicyVersion",
    "PriorityClass",
    "Project",
    "QuotaPolicy",
    "Tenant",
    "known_timezone",
]
