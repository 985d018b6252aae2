"""Endpoints of tenants and what is told to them, as rows. Row-level security binds both: ``migrations/0002``."""

from __future__ import annotations

import uuid
from datetime import datetime

from django.db import models
from django.db.models import Q
from django.utils import timezone

from gateway.batches.ids import new_id
from tenants.models import CLASS_CHOICES, CLASS_LABELS, Tenant

EVENTS = (
    *("batch.completed", "batch.failed", "batch.expired", "batch.cancelled"),
    *("quota.threshold", "budget.exhausted", "class.sla_breach"),
    *("key.revoked", "policy.changed"),
)
OPERATORS_EVENTS = ("reconcile.mismatch",)  # told to the tenant that operators have named as their own


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

    @property
    def previous_good_until(self) -> datetime | None:
        """How long the secret before signs too; None where there is none, or it does so no more."""
        return self.previous_until if self.previous_until and self.previous_until > timezone.now() else None


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


class Threshold(models.Model):
    """A line that a tenant draws for one class: told when its use of a window crosses it, once a window.

    ``amount``: percent of the window's budget, or a number of tokens in the window.
    """

    class Measure(models.TextChoices):
        MONEY = "money", "percent of the budget"
        TOKENS = "tokens", "tokens"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="thresholds")
    priority_class = models.CharField(max_length=16, choices=CLASS_CHOICES)
    measure = models.CharField(max_length=8, choices=Measure.choices)
    amount = models.BigIntegerField()
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["priority_class", "measure", "amount"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "priority_class", "measure", "amount"], name="threshold_drawn_once"
            ),
            models.CheckConstraint(condition=Q(priority_class__in=CLASS_LABELS), name="threshold_class_known"),
            models.CheckConstraint(
                condition=Q(measure="money", amount__gte=1, amount__lte=100) | Q(measure="tokens", amount__gte=1),
                name="threshold_can_be_crossed",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.priority_class} {self.amount} {self.measure}"


class Alert(models.Model):
    """A line was crossed. Always: one for each tenant, event and subject, so that the same is never told as new; the
    subject names class, window and line."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+")
    event = models.CharField(max_length=40)
    subject = models.CharField(max_length=64)
    data = models.JSONField()
    happened_at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["tenant", "-id"], name="alert_by_tenant"),
            models.Index(fields=["happened_at"], name="alert_by_time"),
        ]
        constraints = [models.UniqueConstraint(fields=["tenant", "event", "subject"], name="alert_once")]

    def __str__(self) -> str:
        return f"{self.event} {self.subject}"
