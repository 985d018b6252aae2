"""Under what policy, as rows: class parameters, the quota matrix, versions of both and edits that wait."""

from __future__ import annotations

import uuid

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q
from django.utils.timezone import now

from scheduler_engine.policy import ClassPolicy, TenantClassPolicy, bounds_of
from tenants.bounds import BoundedRow
from tenants.models.accounts import Tenant
from tenants.models.words import CLASS_CHOICES, CLASS_LABELS

PROPOSAL_STATES = ["draft", "waiting", "applied", "withdrawn", "conflict", "refused"]
MAX_TOKENS_DEFAULT = 512
DEFAULT_ABOVE_CAP = "default max tokens must not lie above max tokens cap"
NOT_LOWER = "overflow goes to a lower class, or nowhere"


def _limit(unit: str) -> models.BigIntegerField[int | None, int | None]:
    return models.BigIntegerField(unit, null=True, blank=True, help_text="empty = no limit, 0 = nothing allowed")


def _not_negative(prefix: str, *fields: str) -> list[models.CheckConstraint]:
    return [
        models.CheckConstraint(
            condition=Q(**{f"{field}__gte": 0}),
            name=f"{prefix}_{field}_not_negative",
            violation_error_message=f"{field.replace('_', ' ')} cannot be below 0",
        )
        for field in fields
    ]


def _at_least_one(prefix: str, *fields: str) -> list[models.CheckConstraint]:
    return [
        models.CheckConstraint(
            condition=Q(**{f"{field}__gte": 1}),
            name=f"{prefix}_{field}_positive",
            violation_error_message=f"{field.replace('_', ' ')} must be at least 1",
        )
        for field in fields
    ]


def _percent(prefix: str, *fields: str) -> list[models.CheckConstraint]:
    return [
        models.CheckConstraint(
            condition=Q(**{f"{field}__gte": 0, f"{field}__lte": 100}),
            name=f"{prefix}_{field}_percent",
            violation_error_message=f"{field.replace('_', ' ')} must lie between 0 and 100",
        )
        for field in fields
    ]


class PriorityClass(BoundedRow):
    """Parameters of one of the three classes; the fields of ``scheduler_engine.policy.ClassPolicy``.

    Always: exactly three rows exist, made by migration; they are edited, never added or deleted.
    """

    bounds = bounds_of(ClassPolicy)

    label = models.CharField(primary_key=True, max_length=16, choices=CLASS_CHOICES)
    ttft_target_ms = models.BigIntegerField(
        "first token target (ms)", null=True, blank=True, help_text="ms to the first token; empty = none"
    )
    tbt_target_ms = models.BigIntegerField(
        "between tokens target (ms)", null=True, blank=True, help_text="ms between tokens; empty = none"
    )
    hard_deadline_ms = models.BigIntegerField(
        "hard deadline (ms)", null=True, blank=True, help_text="ms; later than this is shed"
    )
    max_queue_wait_ms = _limit("max queue wait (ms)")
    floor_percent = models.IntegerField("floor (%)", help_text="% of GPU time that is kept for this class")
    cap_slots_percent = models.IntegerField("slots cap (%)", help_text="% of all slots")
    cap_memory_percent = models.IntegerField("memory cap (%)", help_text="% of all KV blocks")
    patience_steps = models.IntegerField(
        "patience (steps)", null=True, blank=True, help_text="steps before it preempts a lower class"
    )
    patience_ms = models.BigIntegerField(
        "patience (ms)", null=True, blank=True, help_text="ms before it preempts; both empty = never"
    )
    fairness_gap_ms = models.BigIntegerField(
        "fairness gap (GPU-ms)", help_text="GPU-ms one tenant may be ahead of another"
    )
    quantum_steps = models.IntegerField(
        "quantum (steps)", help_text="steps before a tenant may be displaced by its own class"
    )
    step_cap_percent = models.IntegerField(
        "step cap (%)", help_text="% of the tightest active first-token target one step may take"
    )
    token_budget_max = models.IntegerField("token budget max", help_text="tokens in one step")
    chunk_max = models.IntegerField(help_text="prompt tokens of one request in one step, at most")
    chunk_min = models.IntegerField(help_text="… and at least")
    bypass_limit = models.IntegerField(help_text="times the head may be overtaken before room is kept for it")
    max_preemptions = models.IntegerField(help_text="times one request may be preempted")
    governor_on_percent = models.IntegerField(
        "governor on (%)", help_text="% of time lost to preemption that stops preempting"
    )
    governor_off_percent = models.IntegerField("governor off (%)", help_text="% that allows it again")

    class Meta:
        ordering = ["label"]
        verbose_name_plural = "priority classes"
        constraints = [
            models.CheckConstraint(condition=Q(label__in=CLASS_LABELS), name="class_label_known"),
            *_percent("class", "floor_percent", "cap_slots_percent", "cap_memory_percent"),
            *_percent("class", "step_cap_percent", "governor_on_percent", "governor_off_percent"),
            *_not_negative("class", "max_queue_wait_ms", "patience_steps", "patience_ms", "fairness_gap_ms"),
            *_not_negative("class", "bypass_limit", "max_preemptions"),
            *_at_least_one("class", "ttft_target_ms", "tbt_target_ms", "hard_deadline_ms", "quantum_steps"),
            *_at_least_one("class", "step_cap_percent", "chunk_min"),
            models.CheckConstraint(
                condition=Q(chunk_min__lte=F("chunk_max")) & Q(chunk_max__lte=F("token_budget_max")),
                name="class_chunks_fit_the_budget",
                violation_error_message="chunk min ≤ chunk max ≤ token budget max must hold",
            ),
            models.CheckConstraint(
                condition=Q(governor_off_percent__lte=F("governor_on_percent")),
                name="class_governor_has_a_band",
                violation_error_message="governor off percent must not lie above governor on percent",
            ),
            models.CheckConstraint(
                condition=Q(patience_steps__isnull=True) | Q(patience_ms__isnull=True),
                name="class_one_patience",
                violation_error_message="patience is in steps or in ms, not both",
            ),
        ]

    def __str__(self) -> str:
        return self.label


class QuotaPolicy(BoundedRow):
    """One cell of the matrix tenant x class; the fields of ``scheduler_engine.policy.TenantClassPolicy``."""

    bounds = bounds_of(TenantClassPolicy)

    class Window(models.TextChoices):
        DAY = "day", "day"
        MONTH = "month", "month"

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="quotas")
    priority_class = models.CharField(max_length=16, choices=CLASS_CHOICES)
    allowed = models.BooleanField(default=True)
    weight = models.IntegerField(default=1, help_text="share of GPU time inside the class, relative to other tenants")
    value_micros = models.BigIntegerField(default=1, help_text="worth of one token when overload forces a choice")
    requests_per_minute = _limit("requests/min")
    tokens_per_minute = _limit("tokens/min")
    concurrency = _limit("at once")
    money_micros = _limit("money (micros/window)")
    money_window = models.CharField("window", max_length=8, choices=Window.choices, default=Window.MONTH)
    default_max_tokens = models.IntegerField(default=MAX_TOKENS_DEFAULT, help_text="when a call names no max_tokens")
    max_tokens_cap = _limit("max tokens/call")
    hard_deadline_ms = models.BigIntegerField(
        "hard deadline (ms)", null=True, blank=True, help_text="to the first token; what cannot keep it is shed"
    )
    overflow_to = models.CharField(
        max_length=16,
        blank=True,
        default="",
        db_default="",
        choices=CLASS_CHOICES,
        help_text="the lower class that serves what this one's limits would refuse; empty = it is refused",
    )
    is_paused = models.BooleanField(
        default=False, db_default=False, editable=False, help_text="granted, and let nobody in for the moment"
    )

    class Meta:
        ordering = ["tenant", "priority_class"]
        verbose_name = "quota"
        verbose_name_plural = "quota matrix"
        constraints = [
            models.UniqueConstraint(fields=["tenant", "priority_class"], name="quota_one_cell"),
            models.CheckConstraint(condition=Q(priority_class__in=CLASS_LABELS), name="quota_class_known"),
            models.CheckConstraint(condition=Q(money_window__in=["day", "month"]), name="quota_window_known"),
            *_at_least_one("quota", "weight", "default_max_tokens", "hard_deadline_ms"),
            *_not_negative("quota", "value_micros", "requests_per_minute", "tokens_per_minute", "concurrency"),
            *_not_negative("quota", "money_micros", "max_tokens_cap"),
            models.CheckConstraint(
                condition=Q(max_tokens_cap__isnull=True) | Q(default_max_tokens__lte=F("max_tokens_cap")),
                name="quota_default_within_cap",
                violation_error_message=DEFAULT_ABOVE_CAP,
            ),
            models.CheckConstraint(
                condition=Q(overflow_to="")
                | Q(priority_class="interactive", overflow_to__in=["default", "batch"])
                | Q(priority_class="default", overflow_to="batch"),
                name="quota_overflow_is_lower",
                violation_error_message=NOT_LOWER,
            ),
            models.CheckConstraint(condition=Q(allowed=False) | Q(is_paused=False), name="quota_paused_lets_nobody_in"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant_id} / {self.priority_class}"

    def clean(self) -> None:
        """The matrix edits the cap and not the default, so its forms leave out the constraint over both."""
        if self.max_tokens_cap is not None and self.default_max_tokens > self.max_tokens_cap:
            raise ValidationError({"max_tokens_cap": f"{DEFAULT_ABOVE_CAP} (the default is {self.default_max_tokens})"})
        labels = list(CLASS_LABELS)
        if self.overflow_to and labels.index(self.overflow_to) <= labels.index(self.priority_class):
            raise ValidationError({"overflow_to": NOT_LOWER})


class PolicyVersion(models.Model):
    """A whole policy as it was at one moment. Always: written once; ``document`` is ``snapshot_to_dict`` of it."""

    version = models.BigAutoField(primary_key=True)
    document = models.JSONField()
    prices = models.JSONField(
        default=list,
        db_default=[],
        blank=True,
        help_text="of prices: place, field, before and after",
    )
    actor = models.CharField(max_length=150)
    reason = models.TextField(default="", blank=True)
    created_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        ordering = ["-version"]

    def __str__(self) -> str:
        return f"version {self.version} by {self.actor}"


class PolicyProposal(models.Model):
    """An edit that waits: to be sent off, for its moment, for a second person, or for all of them.

    Always: applied at most once; what it changes is the difference between ``document`` and version ``based_on``, and
    the ``prices`` that it names.
    """

    class State(models.TextChoices):
        DRAFT = "draft", "draft"
        WAITING = "waiting", "waiting"
        APPLIED = "applied", "applied"
        WITHDRAWN = "withdrawn", "withdrawn"
        CONFLICT = "conflict", "conflict"
        REFUSED = "refused", "refused"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    document = models.JSONField()
    prices = models.JSONField(
        default=list, db_default=[], blank=True, help_text="of prices: place, field, before and after"
    )
    based_on = models.BigIntegerField()
    reason = models.TextField(default="", blank=True)
    created_by = models.CharField(max_length=150)
    created_at = models.DateTimeField(default=now, editable=False)
    effective_from = models.DateTimeField(null=True, blank=True, help_text="empty = as soon as it may")
    needs_approval = models.BooleanField(default=False)
    approved_by = models.CharField(max_length=150, default="", blank=True)
    state = models.CharField(max_length=10, choices=State.choices, default=State.WAITING)
    outcome = models.TextField(default="", blank=True, help_text="the version it became, or why it did not")

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=PROPOSAL_STATES), name="proposal_state_known"),
            models.CheckConstraint(
                condition=Q(approved_by="") | ~Q(approved_by=F("created_by")), name="proposal_approved_by_another"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.created_by}: {self.state}"
