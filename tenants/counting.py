"""At most so many of a tenant's: whoever counts them before adding one does so alone. Refuses to know any limit."""

from __future__ import annotations

from uuid import UUID

from django.db import connections

from tenants.isolation import alias

_LOCK = 7_270_002  # pg_advisory_xact_lock: what one tenant keeps is counted one after another


def count_alone(tenant_id: UUID) -> None:
    """Until the end of the transaction nobody else counts what this tenant keeps."""
    with connections[alias()].cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [_LOCK, str(tenant_id)])
