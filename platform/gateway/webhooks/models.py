"""Endpoints of tenants and what is told to them, as rows. Row-level security binds both: ``migrations/0002``."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.utils import timezone

from gateway.batches.ids import new_id
from tenants.models import Tenant

EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled", "key.revoked")


class Endpoint(models.Model):
    """Where a tenant wants to be told of what. Its secret is no column: it follows from the row (``signing``), so no
    dump and no trail holds one."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="webhook_endpoints")
    url = models.CharField(max_length=500)
    events = models.JSONField(default=list)
    is_active = models.BooleanField(default=True)
    secret_number = models.IntegerField(default=1, help_text="grows by one with each rotation")
    previous_until = models.DateTimeField(null=True, blank=True, help_text="the secret before signs too until then")
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "id"], name="endpoint_reference"),
            models.CheckConstraint(condition=Q(url__regex=r"^https?://"), name="endpoint_url_is_http"),
        ]

    def __str__(self) -> str:
        return self.url


class Delivery(models.Model):
    """One thing that happened, for one endpoint. Always: made once for both; ``id`` stays the same over all tries, and
    is what a receiver drops repetitions by."""

    class State(models.TextChoices):
        PENDING = "pending", "on its way"
        DELIVERED = "delivered", "delivered"
        DEAD = "dead", "given up"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+")
    endpoint = models.ForeignKey(Endpoint, on_delete=models.CASCADE, related_name="deliveries")
    event = models.CharField(max_length=40)
    subject = models.CharField(max_length=64, help_text="id of what it happened to")
    payload = models.JSONField()
    state = models.CharField(max_length=10, choices=State.choices, default=State.PENDING)
    num_attempts = models.IntegerField(default=0)
    next_at = models.DateTimeField(default=timezone.now)
    last_status = models.IntegerField(null=True)
    last_error = models.CharField(max_length=200, default="", blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]  # UUIDv7: newest first
        indexes = [
            models.Index(fields=["tenant", "-id"], name="delivery_by_tenant"),
            models.Index(fields=["next_at"], name="delivery_due", condition=Q(state="pending")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["endpoint", "event", "subject"], name="delivery_once"),
        ]

    def __str__(self) -> str:
        return f"{self.event} {self.state}"
