"""The books as rows: prices, operations, ledger entries, roll-ups, alerts. Knows constraints; refuses to know how
they are written.

Tenants are referenced without a database constraint: a count that has arrived is recorded even when its tenant is
unknown here.
"""

from __future__ import annotations

import uuid

from django.contrib.postgres.indexes import BrinIndex
from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from billing.pricing import CHARGED_TERMINALS, Terminal, TokenKind
from tenants.models import CLASS_CHOICES, CLASS_LABELS, Tenant

OPEN = "open"
RELEASED = "released"
CORRECTIONS = ["adjust", "credit"]  # kinds of entries that people write
LARGEST_PRICE_MICROS = 10**12  # for a million tokens: the dearest call stays far below what a column holds
LARGEST_CORRECTION_MICROS = 10**15  # an adjustment's either way, a credit's: a slip of a key fills no statement
STATES = [OPEN, RELEASED, *(terminal.value for terminal in Terminal)]


def _tenant(related_name: str) -> models.ForeignKey[Tenant, Tenant]:
    return models.ForeignKey(Tenant, on_delete=models.PROTECT, db_constraint=False, related_name=related_name)


class PriceVersion(models.Model):
    """A whole price list at one moment. Always: written once, with its prices; an edit makes the next version."""

    version = models.BigAutoField(primary_key=True)
    actor = models.CharField(max_length=150)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-version"]

    def __str__(self) -> str:
        return f"version {self.version} by {self.actor}"


class Price(models.Model):
    """Micro-units of money for a million tokens of one kind. Always: inserted only."""

    price_version = models.ForeignKey(PriceVersion, on_delete=models.PROTECT, related_name="prices")
    model = models.CharField(max_length=120)
    priority_class = models.CharField(max_length=16, choices=CLASS_CHOICES)
    token_kind = models.CharField(max_length=8, choices=[(kind.value, kind.value) for kind in TokenKind])
    micros_per_million = models.BigIntegerField(
        validators=[
            MaxValueValidator(
                LARGEST_PRICE_MICROS, f"a price is at most {LARGEST_PRICE_MICROS:,} micro-units for a million tokens"
            ),
        ]
    )

    class Meta:
        ordering = ["price_version_id", "model", "priority_class", "token_kind"]
        constraints = [
            models.UniqueConstraint(
                fields=["price_version", "model", "priority_class", "token_kind"], name="price_once_per_version"
            ),
            models.CheckConstraint(
                condition=Q(micros_per_million__gte=0),
                name="price_not_negative",
                violation_error_message="a price cannot be below 0",
            ),
            models.CheckConstraint(condition=Q(priority_class__in=CLASS_LABELS), name="price_class_known"),
            models.CheckConstraint(condition=Q(token_kind__in=list(TokenKind)), name="price_kind_known"),
        ]

    def __str__(self) -> str:
        return f"{self.model} {self.priority_class} {self.token_kind}"


class UsageRequest(models.Model):
    """One operation: a response, whatever its attempts. Always: leaves the state ``open`` once and never returns to it.

    Reserved fields are blank while the end of an operation has arrived before its reservation.
    """

    id = models.UUIDField(primary_key=True)
    tenant = _tenant("usage_requests")
    project_id = models.UUIDField(null=True)
    key_id = models.UUIDField(null=True)
    priority_class = models.CharField(max_length=16, default="")
    model = models.CharField(max_length=120, default="")
    source = models.CharField(max_length=16, default="")
    window_id = models.CharField(max_length=64, default="")
    policy_version = models.BigIntegerField(default=0)
    price_version = models.BigIntegerField(default=0)
    reserved_micros = models.BigIntegerField(default=0)
    reserved_tokens = models.BigIntegerField(default=0)
    reserved_at = models.DateTimeField(null=True)
    requested_class = models.CharField(
        max_length=16,
        default="",
        db_default="",
        blank=True,
        help_text="blank = the class that served it; else a lower one did",
    )
    state = models.CharField(max_length=20, default=OPEN, choices=[(state, state) for state in STATES])
    attempt = models.IntegerField(null=True)
    reason = models.CharField(max_length=120, default="")
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField(default=0)
    cost_micros = models.BigIntegerField(default=0)
    queue_us = models.BigIntegerField(default=0)
    ttft_us = models.BigIntegerField(null=True)
    total_us = models.BigIntegerField(default=0)
    gpu_us = models.BigIntegerField(default=0)
    num_steps = models.BigIntegerField(default=0)
    num_preemptions = models.BigIntegerField(default=0)
    recomputed_tokens = models.BigIntegerField(default=0)
    swapped_bytes = models.BigIntegerField(default=0)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]  # UUIDv7: newest first
        indexes = [
            models.Index(fields=["tenant", "-id"], name="usage_by_tenant"),
            models.Index(fields=["tenant", "priority_class", "window_id"], name="usage_by_window"),
            models.Index(fields=["reserved_at"], name="usage_open", condition=Q(state=OPEN)),
            BrinIndex(fields=["reserved_at"], name="usage_by_time", autosummarize=True),
        ]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=STATES), name="usage_state_known"),
            models.CheckConstraint(condition=Q(priority_class__in=["", *CLASS_LABELS]), name="usage_class_known"),
            models.CheckConstraint(
                condition=Q(requested_class__in=["", *CLASS_LABELS]), name="usage_requested_class_known"
            ),
            models.CheckConstraint(
                condition=Q(cached_tokens__gte=0, prompt_tokens__gte=F("cached_tokens"), output_tokens__gte=0),
                name="usage_counts_possible",
            ),
            models.CheckConstraint(
                condition=Q(cost_micros__gte=0, reserved_micros__gte=0, reserved_tokens__gte=0),
                name="usage_amounts_not_negative",
            ),
            models.CheckConstraint(
                condition=Q(state=OPEN, ended_at__isnull=True) | (~Q(state=OPEN) & Q(ended_at__isnull=False)),
                name="usage_ended_has_a_moment",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.state}"

    @property
    def is_charged(self) -> bool:
        """Whether the price list was applied to its tokens: its end stands in the ledger as a settle."""
        return self.state in CHARGED_TERMINALS and self.prompt_tokens + self.output_tokens > 0


class LedgerEntry(models.Model):
    """One line of the books. Always: inserted, never changed or deleted (trigger and grants); once per (operation,
    key).

    ``amount_micros``: held by a reserve, charged by a settle, 0 on a release; an adjust is signed (positive =
    charged), a
    credit is positive in the tenant's favour. ``attempt`` and tokens stand on the ends that a worker counted.
    """

    class Kind(models.TextChoices):
        RESERVE = "reserve", "reserve"
        SETTLE = "settle", "settle"
        RELEASE = "release", "release"
        ADJUST = "adjust", "adjust"
        CREDIT = "credit", "credit"

    id = models.BigAutoField(primary_key=True)
    operation_id = models.UUIDField()
    entry_key = models.CharField(max_length=80)
    kind = models.CharField(max_length=8, choices=Kind.choices)
    tenant = _tenant("ledger_entries")
    project_id = models.UUIDField(null=True)
    key_id = models.UUIDField(null=True)
    priority_class = models.CharField(max_length=16, default="")
    model = models.CharField(max_length=120, default="")
    amount_micros = models.BigIntegerField()
    price_version = models.BigIntegerField(default=0)
    attempt = models.IntegerField(null=True)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField(default=0)
    reason = models.CharField(max_length=120, default="")
    requested_class = models.CharField(
        max_length=16,
        default="",
        db_default="",
        blank=True,
        help_text="blank = the class that served it; else a lower one did",
    )
    actor = models.CharField(max_length=150)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["id"]
        verbose_name_plural = "ledger entries"
        indexes = [
            models.Index(fields=["tenant", "created_at"], name="ledger_by_tenant"),
            models.Index(
                fields=["tenant", "created_at"], name="ledger_corrections", condition=Q(kind__in=CORRECTIONS)
            ),  # few among millions
            BrinIndex(
                fields=["created_at"], name="ledger_by_time", autosummarize=True
            ),  # rows come in the order of time
        ]
        constraints = [
            models.UniqueConstraint(fields=["operation_id", "entry_key"], name="ledger_exactly_once"),
            models.UniqueConstraint(
                fields=["operation_id"], condition=Q(kind__in=["settle", "release"]), name="ledger_one_end"
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["reserve", "settle", "release"], entry_key=F("kind"))
                | Q(kind="adjust", entry_key__startswith="adjust:")
                | Q(kind="credit", entry_key__startswith="credit:"),
                name="ledger_key_names_the_kind",
            ),
            models.CheckConstraint(condition=Q(kind="adjust") | Q(amount_micros__gte=0), name="ledger_amount_sign"),
            models.CheckConstraint(condition=~Q(kind="release") | Q(amount_micros=0), name="ledger_release_is_free"),
            models.CheckConstraint(
                condition=~Q(kind__in=CORRECTIONS)
                | Q(amount_micros__gte=-LARGEST_CORRECTION_MICROS, amount_micros__lte=LARGEST_CORRECTION_MICROS),
                name="ledger_correction_bounded",
            ),
            models.CheckConstraint(
                condition=Q(cached_tokens__gte=0, prompt_tokens__gte=F("cached_tokens"), output_tokens__gte=0),
                name="ledger_counts_possible",
            ),
            models.CheckConstraint(condition=~Q(operation_id=uuid.UUID(int=0)), name="ledger_operation_named"),
        ]

    def __str__(self) -> str:
        return f"{self.operation_id} {self.entry_key} {self.amount_micros}"


class Rollup(models.Model):
    """Sums of the worker-counted ends of one hour; what was used and charged to nobody has rows of its own. Always:
    equal to the ledger's; recomputable by ``rollups.rebuild``.
    """

    tenant = _tenant("rollups")
    project_id = models.UUIDField(null=True)
    key_id = models.UUIDField(null=True)
    priority_class = models.CharField(max_length=16, choices=CLASS_CHOICES)
    model = models.CharField(max_length=120)
    hour = models.DateTimeField()
    is_charged = models.BooleanField(default=True, db_default=True, help_text="no: used, and charged to nobody")
    num_requests = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    cached_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    cost_micros = models.BigIntegerField()
    num_downgraded = models.BigIntegerField(
        default=0, db_default=0, help_text="of the requests: asked for a higher class"
    )

    class Meta:
        ordering = ["-hour", "tenant_id", "priority_class", "model"]
        indexes = [models.Index(fields=["hour"], name="rollup_by_hour")]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "hour", "project_id", "key_id", "priority_class", "model", "is_charged"],
                name="rollup_one_row",
                nulls_distinct=False,
            ),
        ]

    def __str__(self) -> str:
        return f"{self.tenant_id} {self.priority_class} {self.hour:%Y-%m-%d %H}h"


class Statement(models.Model):
    """What a tenant owes for one day of its calendar. Always: inserted once and never changed; a tenant's statements
    follow each other without overlap, so that every ledger entry stands in exactly one of them.

    total_micros = charged + adjusted - credited, the sums of the ledger's settle, adjust and credit entries in
    [starts_at, ends_at).
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    tenant = _tenant("statements")
    day = models.DateField()
    zone = models.CharField(max_length=64)
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    lines = models.JSONField(help_text="sums by project, key, class, model and price list")
    corrections = models.JSONField(help_text="adjustments and credits, one by one")
    charged_micros = models.BigIntegerField()
    adjusted_micros = models.BigIntegerField()
    credited_micros = models.BigIntegerField()
    total_micros = models.BigIntegerField()
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-day", "tenant_id"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "day"], name="statement_once_a_day"),
            models.UniqueConstraint(fields=["tenant", "starts_at"], name="statement_once_from"),
            models.CheckConstraint(condition=Q(starts_at__lt=F("ends_at")), name="statement_lasts"),
            models.CheckConstraint(
                condition=Q(total_micros=F("charged_micros") + F("adjusted_micros") - F("credited_micros")),
                name="statement_adds_up",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.tenant_id} {self.day}"


class EngineCount(models.Model):
    """What one worker says it counted since it opened an epoch: the books' outside witness. Always: only grows."""

    worker_id = models.CharField(max_length=120)
    epoch = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField()
    output_tokens = models.BigIntegerField()
    rework_prompt_tokens = models.BigIntegerField(default=0, help_text="computed after the response had been given up")
    rework_output_tokens = models.BigIntegerField(default=0)
    seen_at = models.DateTimeField()

    class Meta:
        ordering = ["worker_id", "epoch"]
        constraints = [models.UniqueConstraint(fields=["worker_id", "epoch"], name="engine_count_once_per_epoch")]

    def __str__(self) -> str:
        return f"{self.worker_id} epoch {self.epoch}"


class LedgerAlert(models.Model):
    """Something that must not happen to the books, and did. Always: written once per distinct finding; a person
    closes it.
    """

    id = models.BigAutoField(primary_key=True)
    subject = models.CharField(max_length=120, help_text="operation id, or the entry id where no operation is known")
    reason = models.CharField(max_length=40)
    detail = models.TextField()
    fingerprint = models.CharField(max_length=64, unique=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    closed_at = models.DateTimeField(null=True, blank=True)
    closed_by = models.CharField(max_length=150, default="", blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.reason} {self.subject}"
