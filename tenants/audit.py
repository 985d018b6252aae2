"""Who changes accounts and policy, said to the database, whose triggers write the trail. Refuses to write it itself.

A change that nobody signed (raw SQL, a forgotten service) is on record as ``sql:<database role>``: never without actor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from django.db import connections, migrations, transaction

from tenants.isolation import alias
from tenants.models.words import without_turns

LONGEST_REASON = 1_000
_SETTINGS = ("app.actor", "app.reason", "app.request")
_READ, _WRITE = "coalesce(current_setting('%s', true), '')", "set_config('%s', %%s, true)"
_request_id: ContextVar[str] = ContextVar("audit_request_id", default="")
_reason: ContextVar[str] = ContextVar("audit_reason", default="")


def kept(reason: str) -> str:
    """As much of a reason as is kept; no text of the database holds a NUL."""
    return reason.replace("\0", "")[:LONGEST_REASON]


@contextmanager
def request(request_id: str, reason: str = "") -> Iterator[None]:
    """Changes made inside are on record with this request id and reason, as far as it can be kept, in one direction of
    writing.
    """
    tokens = _request_id.set(request_id), _reason.set(without_turns(kept(reason)))
    try:
        yield
    finally:
        _request_id.reset(tokens[0])
        _reason.reset(tokens[1])


@contextmanager
def change_by(actor: str, reason: str = "") -> Iterator[None]:
    """One transaction whose changes are this actor's, for this reason (else the request's). Raises ValueError for
    nobody.
    """
    if not actor:
        raise ValueError("a change has an actor")
    with transaction.atomic(using=alias()):
        before = _signed()
        _sign((actor, reason or _reason.get(), _request_id.get()))
        yield
        _sign(before)  # an outer transaction goes on under its own name; after an error the rollback does the same


def _signed() -> tuple[str, ...]:
    with connections[alias()].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(_READ % name for name in _SETTINGS)}")
        return tuple(cursor.fetchone())


def _sign(values: tuple[str, ...]) -> None:
    with connections[alias()].cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(_WRITE % name for name in _SETTINGS)}", values)


def watch(table: str, *, id_column: str = "id", tenant_column: str | None = "tenant_id") -> migrations.RunSQL:
    """Every insert, update and delete of this table is on record from now on."""
    arguments = f"'{id_column}', '{tenant_column or ''}'"
    return migrations.RunSQL(
        f"CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON {table}"
        f" FOR EACH ROW EXECUTE FUNCTION tenants_audit({arguments})",
        f"DROP TRIGGER audit ON {table}",
    )
