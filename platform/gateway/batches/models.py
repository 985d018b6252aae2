"""Files, batches and their lines as rows. Knows constraints; refuses to know how anything is changed.

Row-level security binds all three: ``migrations/0002``. Content lies on disk under an opaque name (``storage``).
"""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from gateway.batches.ids import new_id
from tenants.models import Project, Tenant


class StoredFile(models.Model):
    """A file of a tenant. Always: its content is whole on disk for as long as the row is there."""

    class Purpose(models.TextChoices):
        BATCH = "batch", "batch"
        BATCH_OUTPUT = "batch_output", "batch output"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="files")
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="files")
    purpose = models.CharField(max_length=16, choices=Purpose.choices)
    filename = models.CharField(max_length=255)
    num_bytes = models.BigIntegerField()
    storage_name = models.CharField(max_length=32, unique=True, editable=False)
    created_by = models.CharField(max_length=150, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-id"]  # UUIDv7: newest first
        indexes = [models.Index(fields=["tenant", "-id"], name="file_by_tenant")]
        constraints = [
            models.CheckConstraint(condition=Q(purpose__in=["batch", "batch_output"]), name="file_purpose_known"),
            models.CheckConstraint(condition=Q(num_bytes__gte=0), name="file_size_not_negative"),
            models.CheckConstraint(condition=Q(storage_name__regex=r"^[0-9a-f]{32}$"), name="file_storage_name_shape"),
        ]

    def __str__(self) -> str:
        return f"{self.filename} ({self.purpose})"


class Batch(models.Model):
    """Many requests in one file. Always: leaves a status once and never returns to it; one owner writes its lines,
    the one whose ``fencing_token`` is the newest.

    ``outcome`` is how it will end, set once no line is driven any more; the files are written after that.
    """

    class Status(models.TextChoices):
        VALIDATING = "validating", "validating"
        FAILED = "failed", "failed"
        IN_PROGRESS = "in_progress", "in progress"
        FINALIZING = "finalizing", "finalizing"
        COMPLETED = "completed", "completed"
        EXPIRED = "expired", "expired"
        CANCELLING = "cancelling", "cancelling"
        CANCELLED = "cancelled", "cancelled"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="batches")
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="batches")
    key_id = models.UUIDField(editable=False)
    key_public_id = models.CharField(max_length=12, editable=False)
    endpoint = models.CharField(max_length=64)
    # by value: a batch still names its files when they are gone
    input_file_id = models.UUIDField()
    output_file_id = models.UUIDField(null=True, blank=True)
    error_file_id = models.UUIDField(null=True, blank=True)
    completion_window = models.CharField(max_length=8, default="24h")
    output_lifetime_s = models.BigIntegerField()
    metadata = models.JSONField(null=True, blank=True)
    form_id = models.UUIDField(null=True, editable=False, help_text="of the console's form that made it, once")
    model = models.CharField(max_length=200, default="", blank=True, help_text="of all lines; empty when they differ")
    status = models.CharField(max_length=12, choices=Status.choices, default=Status.VALIDATING)
    outcome = models.CharField(max_length=12, choices=Status.choices, default="", blank=True)
    errors = models.JSONField(default=list, blank=True)
    num_lines = models.IntegerField(default=0)
    num_completed = models.IntegerField(default=0)
    num_failed = models.IntegerField(default=0)
    input_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    output_tokens = models.BigIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True, blank=True)
    finalizing_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)
    expired_at = models.DateTimeField(null=True, blank=True)
    cancelling_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    # the lease
    fencing_token = models.BigIntegerField(default=0)
    owner = models.CharField(max_length=64, default="", blank=True)
    leased_until = models.DateTimeField(null=True, blank=True)
    claimed_up_to = models.IntegerField(default=0, help_text="lines up to this number may be under way")

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "batches"
        indexes = [
            models.Index(fields=["tenant", "-id"], name="batch_by_tenant"),
            models.Index(
                fields=["created_at"],
                name="batch_at_work",
                condition=Q(status__in=["validating", "in_progress", "finalizing", "cancelling"]),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "id"], name="batch_reference"),  # target of composite keys
            models.UniqueConstraint(fields=["tenant", "form_id"], name="batch_once_a_form"),
            models.CheckConstraint(
                condition=Q(
                    num_completed__gte=0, num_failed__gte=0, num_lines__gte=F("num_completed") + F("num_failed")
                ),
                name="batch_counts_possible",
            ),
            models.CheckConstraint(
                condition=Q(outcome__in=["", "completed", "failed", "expired", "cancelled"]), name="batch_outcome_known"
            ),
            *[
                models.CheckConstraint(
                    condition=~Q(status=status) | Q(**{f"{status}_at__isnull": False}), name=f"batch_{status}_at_known"
                )
                for status in ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
            ],
        ]

    def __str__(self) -> str:
        return f"{self.id} {self.status}"


class Line(models.Model):
    """One request of a batch. Always: ends once, with its answer; then it is never asked again."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+")
    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="lines", db_index=False)
    number = models.IntegerField(help_text="line of the input file, from 1")
    custom_id = models.CharField(max_length=512)
    start = models.BigIntegerField(help_text="first byte in the input file")
    num_bytes = models.IntegerField()
    num_tries = models.IntegerField(default=0, help_text="operations that ended without an answer")
    status_code = models.IntegerField(null=True)
    request_id = models.CharField(max_length=64, default="", blank=True)
    answer = models.BinaryField(null=True, help_text="the body of the answer, or of the error, as JSON")
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["batch_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["batch", "number"], name="line_once"),
            models.UniqueConstraint(fields=["batch", "custom_id"], name="line_one_per_custom_id"),
            models.CheckConstraint(condition=Q(number__gte=1, num_tries__gte=0), name="line_numbers_possible"),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, answer__isnull=True, status_code__isnull=True)
                | Q(ended_at__isnull=False, answer__isnull=False, status_code__isnull=False),
                name="line_ends_with_an_answer",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id} line {self.number}"
