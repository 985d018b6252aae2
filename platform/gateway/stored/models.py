"""A finished response as a row: its card and its output, as they stood in Redis. Knows no text.

Row-level security binds it: ``migrations/0002``.
"""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from tenants.models import Tenant


class StoredResponse(models.Model):
    """Always: written once, when the response has ended, and never changed; its tenant asked for that."""

    id = models.UUIDField(primary_key=True, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="stored_responses")
    card = models.BinaryField()
    output = models.BinaryField()
    stored_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]  # UUIDv7: newest first
        indexes = [
            models.Index(fields=["tenant", "-id"], name="response_by_tenant"),
            models.Index(fields=["stored_at"], name="response_by_age"),
        ]

    def __str__(self) -> str:
        return f"resp_{self.id}"
