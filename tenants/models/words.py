"""Words that rows of accounts and of policy share."""

from __future__ import annotations

from scheduler_engine.policy import PriorityClass as ClassName
from tenants.roles import Role

CLASS_CHOICES = [(name.label, name.label) for name in ClassName]
CLASS_LABELS = [name.label for name in ClassName]
ROLE_CHOICES = [(role.value, role.value) for role in Role]
