"""The wall between tenants: row-level security as migration operations, and the one door through it.

Outside ``with tenant(…)`` the role app_rw sees no row at all. Knows the two roles' names; refuses to know who a user
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, connections, migrations, transaction

ALIAS = "tenant"
SETTING = "app.tenant"


_inside: ContextVar[bool] = ContextVar("inside_a_tenant", default=False)


class IsolationError(Exception):
    """Code tried to stand in two tenants at once."""


@contextmanager
def tenant(tenant_id: UUID) -> Iterator[None]:
    """One transaction on the alias ``tenant`` in which exactly this tenant's rows exist. Raises IsolationError inside
    another's.
    """
    with transaction.atomic(using=ALIAS):
        before = _enter(str(tenant_id))
        if before not in ("", str(tenant_id)):
            raise IsolationError("leave the other tenant first")
        token = _inside.set(True)
        try:
            yield
        finally:
            _inside.reset(token)
        _set(before)  # an outer transaction goes on without it; after an error the rollback does the same


def alias() -> str:
    """The database alias that services and selectors of accounts use here: behind the wall inside ``with tenant(…)``,
    else the operator's."""
    return ALIAS if _inside.get() else DEFAULT_DB_ALIAS


def _enter(value: str) -> str:
    """What the setting was before; of the two it is read first. A refusal's rollback takes the new value back."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(
            "WITH before AS MATERIALIZED (SELECT coalesce(current_setting(%s, true), '') AS value)"
            " SELECT value, set_config(%s, %s, true) FROM before",
            [SETTING, SETTING, value],
        )
        return str(cursor.fetchone()[0])


def _set(value: str) -> None:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT set_config(%s, %s, true)", [SETTING, value])  # true: until the transaction ends


def protect(table: str, tenant_column: str = "tenant_id", writes: str = "") -> migrations.RunSQL:
    """Forced row security on one table: app_rw reads its tenant's rows, app_ops all of them, the owner none.

    ``writes``: what else app_rw may do with its own rows, as SQL grants ("INSERT, UPDATE (name)").

    The sub-select makes the setting an init-plan, read once per query. An empty setting is no tenant.
    """
    match = f"{tenant_column} = (SELECT NULLIF(current_setting('{SETTING}', true), '')::uuid)"
    return migrations.RunSQL(
        sql=[
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            f"CREATE POLICY own_rows ON {table} TO app_rw USING ({match}) WITH CHECK ({match})",
            f"CREATE POLICY all_rows ON {table} TO app_ops USING (true) WITH CHECK (true)",
            f"GRANT SELECT{', ' + writes if writes else ''} ON {table} TO app_rw",
        ],
        reverse_sql=[
            f"REVOKE ALL ON {table} FROM app_rw",
            f"DROP POLICY all_rows ON {table}",
            f"DROP POLICY own_rows ON {table}",
            f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY",
        ],
    )
