"""What is so: policy rows as the engine's values, and the versions of them. Reads only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.timezone import now

from scheduler_engine.policy import ClassPolicy, PolicySnapshot, TenantClassPolicy, gpu_classes, snapshot_to_dict
from scheduler_engine.policy import PriorityClass as ClassName
from tenants.models import ApiKey, AuditEvent, PolicyVersion, PriorityClass, QuotaPolicy, Tenant


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """One saved version. ``policy`` is a document of ``policy_changes``."""

    version: int
    policy: dict[str, Any]


def open_keys() -> QuerySet[ApiKey]:
    """Keys that open inference now: all that are recommended, or offered to be chosen, anywhere."""
    unended = Q(expires_at=None) | Q(expires_at__gt=now())
    return ApiKey.objects.filter(unended, revoked_at=None, role="")


def class_policy(row: PriorityClass) -> ClassPolicy:
    """A class row as the engine's value, saved or not."""
    values = {field.name: getattr(row, field.name) for field in fields(ClassPolicy) if field.name != "priority_class"}
    return ClassPolicy(priority_class=ClassName.from_label(row.label), **values)


def tenant_class_policy(row: QuotaPolicy) -> TenantClassPolicy:
    """A cell of the quota matrix as the engine's value, saved or not, as if nothing were paused."""
    own = ("tenant_id", "priority_class", "overflow_to", "allowed")
    values = {field.name: getattr(row, field.name) for field in fields(TenantClassPolicy) if field.name not in own}
    return TenantClassPolicy(
        tenant_id=str(row.tenant_id),
        priority_class=ClassName.from_label(row.priority_class),
        overflow_to=ClassName.from_label(row.overflow_to) if row.overflow_to else None,
        allowed=row.allowed or row.is_paused,
        **values,
    )


def live_snapshot(version: int) -> PolicySnapshot:
    """The rows as they stand, under a version number. A class without a row stands at its GPU default."""
    rows = {row.label: class_policy(row) for row in PriorityClass.objects.all()}
    interactive, default, batch = (rows.get(policy.priority_class.label, policy) for policy in gpu_classes())
    cells = QuotaPolicy.objects.order_by("tenant_id", "priority_class")
    return PolicySnapshot(
        version=version,
        classes=(interactive, default, batch),
        tenants=tuple(tenant_class_policy(cell) for cell in cells),
    )


def live_policy(version: int) -> dict[str, object]:
    """The rows as a document of ``policy_changes``."""
    paused = QuotaPolicy.objects.filter(is_paused=True).order_by("tenant_id", "priority_class")
    return {
        **snapshot_to_dict(live_snapshot(version)),
        "paused": [f"{cell.tenant_id} {cell.priority_class}" for cell in paused],
    }


def current_policy() -> StoredPolicy | None:
    """The newest saved version; None before the first edit."""
    newest = PolicyVersion.objects.order_by("-version").first()
    return None if newest is None else StoredPolicy(newest.version, newest.document)


def policy_at(version: int) -> StoredPolicy | None:
    """One saved version; None where there is none."""
    found = PolicyVersion.objects.filter(version=version).first()
    return None if found is None else StoredPolicy(found.version, found.document)


def paused_by() -> dict[str, str]:
    """Who paused what is paused, by its place: "<tenant id> <class>"."""
    paused = {str(cell.pk): cell for cell in QuotaPolicy.objects.filter(is_paused=True)}
    pauses = AuditEvent.objects.filter(object_id__in=paused, object_type="quotapolicy", after__is_paused=True)
    actors = dict(pauses.order_by("id").values_list("object_id", "actor"))  # the last of each stands
    return {f"{cell.tenant_id} {cell.priority_class}": actors.get(key, "") for key, cell in paused.items()}


def tenants_by_id() -> dict[str, dict[str, str]]:
    """Names and zones of all tenants, active or not, for gateways and boards."""
    return {
        str(tenant.id): {"slug": tenant.slug, "name": tenant.name, "timezone": tenant.timezone}
        for tenant in Tenant.objects.order_by("slug")
    }
