"""Nobody in a tenant reaches above themselves: what holds a role is handled by who may do at least as much.

Knows the role of whoever acts; refuses to know whether it is a person or a management key. Operators act outside every
tenant's wall, and may all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from django.core.exceptions import PermissionDenied

from tenants import isolation
from tenants.roles import Role, covers

_acting: ContextVar[Role | None] = ContextVar("acting_role", default=None)


class AboveOneself(PermissionDenied):
    """``deed``, on something whose role may do more than ``role``."""

    def __init__(self, role: Role | None, deed: str) -> None:
        super().__init__(f"{f'As {role}' if role else 'Without a role'} you may not {deed}: it may do more than you.")
        self.deed = deed


@contextmanager
def acting_as(role: Role) -> Iterator[None]:
    """What is done inside is done by a member, or a key, of this role."""
    token = _acting.set(role)
    try:
        yield
    finally:
        _acting.reset(token)


def require(role: Role, deed: str) -> None:
    """Raises AboveOneself where whoever acts inside a tenant's wall may do less than ``role``, or never said as what
    they act.
    """
    mine = _acting.get()
    if isolation.alias() == isolation.ALIAS and not (mine and covers(mine, role)):
        raise AboveOneself(mine, deed)
