"""Who may use the platform, as rows: tenants, projects, keys, members, and the trail of changes."""

from __future__ import annotations

import uuid
import zoneinfo
from datetime import datetime

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.utils.timezone import now

from scheduler_engine.policy import PriorityClass as ClassName
from tenants.models.words import CLASS_CHOICES, CLASS_LABELS, ROLE_CHOICES, Named
from tenants.roles import Role


def known_timezone(name: str) -> None:
    """Money windows are calendar windows of this zone. Raises ValidationError for a name no calendar knows."""
    if name not in zoneinfo.available_timezones():
        raise ValidationError(f"{name!r} is no time zone; write one like Europe/Vienna or UTC")


class Tenant(Named):
    """A customer. Always: the slug never changes meaning, and a tenant with a ledger is made inactive, never
    deleted.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    slug = models.CharField(
        max_length=40,
        unique=True,
        validators=[RegexValidator(r"^[a-z][a-z0-9-]*\Z", "small letters, digits and hyphens, a letter first")],
    )
    name = models.CharField(max_length=120)
    timezone = models.CharField(max_length=64, default="UTC", validators=[known_timezone])
    is_active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        ordering = ["slug"]
        constraints = [models.CheckConstraint(condition=~Q(slug=""), name="tenant_slug_not_empty")]

    def __str__(self) -> str:
        return self.name


class Project(Named):
    """A tenant's unit of work; names the class used when a call asks for none."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="projects")
    name = models.CharField(max_length=120)
    default_class = models.CharField(max_length=16, choices=CLASS_CHOICES, default=ClassName.DEFAULT.label)
    created_by = models.CharField(max_length=150, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        ordering = ["tenant_id", "name"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="project_name_once_per_tenant"),
            models.UniqueConstraint(fields=["tenant", "id"], name="project_reference"),  # target of composite keys
            models.CheckConstraint(condition=Q(default_class__in=CLASS_LABELS), name="project_class_known"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.tenant_id})"


class ApiKey(Named):
    """A key's stored half. Always: the secret itself is nowhere; ``revoked_at`` is set once and never cleared."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="api_keys")
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="api_keys")
    name = models.CharField(max_length=120)
    public_id = models.CharField(max_length=12, unique=True, editable=False)
    secret_sha256 = models.CharField(max_length=64, editable=False)
    last4 = models.CharField(max_length=4, editable=False)
    created_by = models.CharField(max_length=150, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    role = models.CharField(
        max_length=16, choices=ROLE_CHOICES, default="", blank=True, help_text="of a management key; empty = inference"
    )
    previous_sha256 = models.CharField(max_length=64, default="", editable=False)
    previous_last4 = models.CharField(max_length=4, default="", editable=False)
    previous_until = models.DateTimeField(null=True, editable=False, help_text="the secret before the last rotation")
    rotated_at = models.DateTimeField(null=True, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    revoked_by = models.CharField(max_length=150, default="", editable=False)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["tenant_id", "name"]
        verbose_name = "API key"
        indexes = [models.Index(fields=["tenant", "created_at"], name="key_by_tenant")]
        constraints = [
            models.CheckConstraint(condition=Q(public_id__regex=r"^[0-9A-Za-z]{12}$"), name="key_public_id_shape"),
            models.CheckConstraint(condition=Q(secret_sha256__regex=r"^[0-9a-f]{64}$"), name="key_digest_shape"),
            models.CheckConstraint(
                condition=Q(previous_sha256="", previous_until__isnull=True)
                | Q(previous_sha256__regex=r"^[0-9a-f]{64}$", previous_until__isnull=False),
                name="key_previous_secret_ends",
            ),
            models.CheckConstraint(condition=Q(role__in=["", *Role]), name="key_role_known"),
        ]

    @property
    def has_ended(self) -> bool:
        """Revoked, or its time is over."""
        return self.revoked_at is not None or (self.expires_at is not None and self.expires_at <= now())

    @property
    def previous_good_until(self) -> datetime | None:
        """When the secret before the last rotation ends; None where there is none, or it has ended."""
        return self.previous_until if self.previous_until and self.previous_until > now() else None

    @property
    def actor(self) -> str:
        """Who has done what is done by this key."""
        return f"key:{self.name} {self.public_id}"

    def __str__(self) -> str:
        return f"{self.name} …{self.last4}"


class Membership(models.Model):
    """A person's role in a tenant. Always: one role each; a tenant never loses its last owner (services)."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    email = models.EmailField(help_text="of the user, kept here since tenants cannot read the table of users")
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    created_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        ordering = ["tenant_id", "created_at"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "user"], name="member_once_per_tenant"),
            models.CheckConstraint(condition=Q(role__in=list(Role)), name="member_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.email} {self.role}"


class Invitation(models.Model):
    """A role offered to an address; whoever holds the link takes it, once. Always: only the link's digest is stored."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="invitations")
    email = models.EmailField()
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    token_sha256 = models.CharField(max_length=64, unique=True, editable=False)
    invited_by = models.CharField(max_length=150, editable=False)
    created_at = models.DateTimeField(default=now, editable=False)
    expires_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, editable=False, help_text="when it was accepted or taken back")

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "email"], condition=Q(ended_at__isnull=True), name="invitation_once_open"
            ),
            models.CheckConstraint(condition=Q(role__in=list(Role)), name="invitation_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.email} {self.role}"


class AuditEvent(models.Model):
    """One change of an account, a key, a member, a price or a policy. Always: written by a database trigger and by
    nothing else, so that bulk edits and raw SQL are in it too; never changed.

    ``before`` and ``after`` hold the columns that differ; digests of secrets are never among them.
    """

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField()
    tenant_id = models.UUIDField(null=True, help_text="empty where no one tenant is meant")
    object_type = models.CharField(max_length=64)
    object_id = models.CharField(max_length=64)
    action = models.CharField(max_length=8)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    actor = models.CharField(max_length=150)
    reason = models.TextField(default="")
    request_id = models.CharField(max_length=64, default="")

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["tenant_id", "-id"], name="audit_by_tenant"),
            models.Index(fields=["object_id"], name="audit_by_object"),
        ]

    def __str__(self) -> str:
        return f"{self.actor}: {self.action} {self.object_type} {self.object_id}"
