"""Everything that changes tenants, keys and policy: keyword-only, actor given, one transaction, events after commit.

Refuses to know Redis: what must be told is told through the two publishers that the settings name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from scheduler_engine.policy import (
    ClassPolicy,
    PolicyError,
    TenantClassPolicy,
    snapshot_from_dict,
)
from scheduler_engine.policy import PriorityClass as ClassName
from tenants import api_keys, members, rights, selectors
from tenants.audit import change_by
from tenants.checks import checked_by_the_database
from tenants.isolation import alias
from tenants.models import ApiKey, PolicyVersion, PriorityClass, Project, QuotaPolicy, Tenant
from tenants.models.words import one_direction
from tenants.news import News
from tenants.policy_changes import Change, granted
from tenants.refusals import StillGood
from tenants.roles import Role

MAX_FLOORS_PERCENT = 100
NEW_TENANT = ("Tenant ", " is new.")  # before and after its name: the reason of a version that brought it alone
LONGEST_GRACE = timedelta(days=30)
_ROTATED = ["secret_sha256", "last4", "previous_sha256", "previous_last4", "previous_until", "rotated_at"]
_POLICY_LOCK = 7_270_001  # pg_advisory_xact_lock: policy edits happen one after another


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A stored key and its text, which is shown once. ``news``: of a rotation; a new key needs none."""

    key: ApiKey
    text: str
    news: News = field(default_factory=lambda: News(is_told=True))


def create_tenant(*, actor: str, slug: str, name: str, timezone: str = "UTC") -> Tenant:
    """A tenant with its row of the quota matrix: the default class allowed, the others not. Raises ValidationError."""
    with change_by(actor):
        tenant = write_tenant(slug=slug, name=name, timezone=timezone)
        record_policy(actor, name.join(NEW_TENANT))
    return tenant


def update_tenant(
    *, actor: str, tenant_id: UUID, name: str, timezone: str, is_active: bool, reason: str = ""
) -> Tenant:
    """Rename, move to another zone, switch off or on: at once, and on record with who and why. An inactive tenant's
    keys open nothing. Raises ValidationError.
    """
    one_direction(reason)
    with change_by(actor, reason):
        tenant = Tenant.objects.select_for_update().get(id=tenant_id)
        done = [
            *([f"renamed to {name}"] if name != tenant.name else []),
            *([f"moved to {timezone}"] if timezone != tenant.timezone else []),
            *([f"switched {'on' if is_active else 'off'}"] if is_active != tenant.is_active else []),
        ]
        told = f"{tenant.name}: {', '.join(done)}. {reason}".strip() if done else reason
        tenant.name, tenant.timezone, tenant.is_active = name, timezone, is_active
        tenant.full_clean()
        tenant.save(update_fields=["name", "timezone", "is_active"])
        record_policy(actor, told)
        for public_id in tenant.api_keys.values_list("public_id", flat=True):
            _tell_key_changed(public_id)
    return tenant


def create_project(*, actor: str, tenant: Tenant, name: str, default_class: ClassName = ClassName.DEFAULT) -> Project:
    """Raises ValidationError, for instance for a name the tenant has used."""
    project = Project(tenant=tenant, name=name, default_class=default_class.label, created_by=actor)
    with change_by(actor):
        project.full_clean()
        with checked_by_the_database(Project, alias()):
            project.save(force_insert=True)
    return project


def update_project(*, actor: str, project_id: UUID, name: str, default_class: ClassName) -> Project:
    """Rename, or change the class used when a call asks for none. Raises ValidationError."""
    with change_by(actor):
        project = Project.objects.select_for_update().get(id=project_id)
        project.name, project.default_class = name, default_class.label
        project.full_clean()
        with checked_by_the_database(Project, alias()):
            project.save(update_fields=["name", "default_class"])
        for public_id in project.api_keys.values_list("public_id", flat=True):
            _tell_key_changed(public_id)
    return project


def issue_key(
    *,
    actor: str,
    project: Project,
    name: str,
    env: str,
    expires_at: datetime | None = None,
    role: Role | None = None,
    key_id: UUID | None = None,
) -> IssuedKey:
    """A new key of the project's tenant. Its text leaves here once and is stored nowhere.

    With a role it is a management key: it opens the management API and no inference. Raises ValidationError, also where
    there is a key of this ``key_id``, and for an end that has passed; and AboveOneself.
    """
    if role is not None:
        rights.require(role, f"make a key of the role {role}")
    if expires_at is not None and expires_at <= timezone.now():
        raise ValidationError({"expires_at": "a key ends in the future"})
    new = api_keys.make(env)
    key = ApiKey(
        tenant_id=project.tenant_id,
        project=project,
        name=name,
        public_id=new.public_id,
        secret_sha256=new.secret_sha256,
        last4=new.last4,
        expires_at=expires_at,
        role=role.value if role else "",
        created_by=actor,
    )
    if key_id is not None:
        key.id = key_id
    with change_by(actor):
        key.full_clean(exclude=["id"])
        with checked_by_the_database(ApiKey, alias()):
            key.save(force_insert=True)
    return IssuedKey(key, new.text)


def rotate_key(
    *,
    actor: str,
    key_id: UUID,
    env: str,
    grace: timedelta,
    expected_last4: str | None = None,
    end_previous: bool = False,
) -> IssuedKey:
    """A new secret for the same key; the one before goes on opening for ``grace``, and then ends. Its public id stays.

    Raises StillGood while the secret before the last rotation opens, which ``end_previous`` ends now; ValidationError
    for a key that has ended, and for one whose secret does not end as expected any more; AboveOneself; and
    ApiKey.DoesNotExist.
    """
    if not timedelta(0) <= grace <= LONGEST_GRACE:
        raise ValidationError(f"grace lies between 0 and {LONGEST_GRACE.days} days")
    with change_by(actor):
        key = ApiKey.objects.select_for_update().get(id=key_id)
        require_rotatable(key)
        now = timezone.now()
        if key.has_ended:
            raise ValidationError(f"{key.name} has ended, and cannot be rotated: make a new key")
        if expected_last4 not in (None, key.last4):
            raise ValidationError(f"{key.name} has been rotated since this form was opened; it ends in {key.last4} now")
        if not end_previous and (until := key.previous_good_until):
            otherwise = "make another key to keep it, or say expressly that it ends now"
            raise StillGood(f"the secret that {key.name} had before its last rotation", until, otherwise)
        new = api_keys.make(env, key.public_id)
        keeps = grace > timedelta(0)
        key.previous_sha256, key.previous_last4 = (key.secret_sha256, key.last4) if keeps else ("", "")
        key.previous_until = now + grace if keeps else None
        key.secret_sha256, key.last4, key.rotated_at = new.secret_sha256, new.last4, now
        key.save(update_fields=_ROTATED)
        news = _tell_key_changed(key.public_id, is_asked_for=bool(key.role))
    return IssuedKey(key, new.text, news)


def require_rotatable(key: ApiKey) -> None:
    """Raises AboveOneself: whoever rotates a key holds it afterwards."""
    if key.role:
        rights.require(Role(key.role), f"rotate a key of the role {key.role}")


def revoke_key(*, actor: str, key_id: UUID) -> News | None:
    """Ends a key for good, of whatever role, and the open invitations that it made: that gives nobody anything, and a
    leak waits for no owner. None when it had ended before: the first revocation stands.
    """
    with change_by(actor):
        changed = ApiKey.objects.filter(id=key_id, revoked_at=None).update(revoked_at=timezone.now(), revoked_by=actor)
        if not changed:
            return None
        key = ApiKey.objects.get(id=key_id)
        members.end_offers(tenant_id=key.tenant_id, maker=key.actor)
        return _tell_key_changed(key.public_id, is_asked_for=bool(key.role))


def save_quota(*, actor: str, policy: TenantClassPolicy) -> PolicyVersion:
    """Writes one cell of the matrix and the next policy version. Raises ValidationError."""
    return save_quotas(actor=actor, policies=[policy])


def save_quotas(*, actor: str, policies: Sequence[TenantClassPolicy], reason: str = "") -> PolicyVersion:
    """Several cells in one version. Raises ValidationError."""
    with change_by(actor):
        serialise_policy_edits()
        write_rows(cells=policies)
        return record_policy(actor, reason)


def save_class(*, actor: str, policy: ClassPolicy) -> PolicyVersion:
    """Writes one class's parameters and the next policy version. Raises ValidationError."""
    return save_classes(actor=actor, policies=[policy])


def save_classes(*, actor: str, policies: Sequence[ClassPolicy], reason: str = "") -> PolicyVersion:
    """Several classes in one version: their floors, for instance, must fit together. Raises ValidationError."""
    with change_by(actor):
        serialise_policy_edits()
        write_rows(classes=policies)
        return record_policy(actor, reason)


def switch_class(*, actor: str, tenant_id: UUID, label: str, is_paused: bool, reason: str = "") -> PolicyVersion:
    """Shuts a class that is granted to the tenant, at once and for every call; or opens what was shut so. It grants
    nothing. Raises ValidationError where there is nothing to pause or to resume, and QuotaPolicy.DoesNotExist.
    """
    one_direction(reason)
    with change_by(actor):
        serialise_policy_edits()
        cell = QuotaPolicy.objects.select_related("tenant").get(tenant_id=tenant_id, priority_class=label)
        if is_paused and cell.is_paused:
            who = selectors.paused_by()[f"{tenant_id} {label}"]
            raise ValidationError(f"{label} is paused for {cell.tenant.name} already, by {who}")
        if is_paused and not cell.tenant.is_active:
            raise ValidationError(f"{cell.tenant.name} is switched off: nobody of it is let in, in any class")
        if is_paused and not cell.allowed:
            raise ValidationError(f"{label} is not granted to {cell.tenant.name}: there is nothing to pause")
        if not (is_paused or cell.is_paused):
            raise ValidationError(f"{label} was not paused for {cell.tenant.name}: to grant it, tick it and see first")
        cell.allowed, cell.is_paused = not is_paused, is_paused
        done = f"emergency: {cell.tenant.name}, {label} {'paused' if is_paused else 'resumed'}. {reason}".strip()
        with change_by(actor, done):
            cell.save(update_fields=["allowed", "is_paused"])
        return record_policy(actor, done)


def write_tenant(*, slug: str, name: str, timezone: str = "UTC") -> Tenant:
    """Its rows; ``record_policy`` follows in the same transaction. Raises ValidationError."""
    tenant = Tenant(slug=slug, name=name, timezone=timezone)
    tenant.full_clean()
    with checked_by_the_database(Tenant, alias()):
        tenant.save(force_insert=True)
    QuotaPolicy.objects.bulk_create(
        QuotaPolicy(tenant=tenant, priority_class=label.label, allowed=label is ClassName.DEFAULT)
        for label in ClassName
    )
    return tenant


def check_rows(*, classes: Sequence[ClassPolicy] = (), cells: Sequence[TenantClassPolicy] = ()) -> None:
    """Raises the ValidationError that ``write_rows`` would for a row by itself; writes nothing."""
    for row in _rows(classes, cells):
        try:
            row.full_clean(validate_unique=False, validate_constraints=False)
        except ValidationError as refusal:
            where = f"{row.tenant.name}, {row.priority_class}" if isinstance(row, QuotaPolicy) else f"class {row.label}"
            raise ValidationError(f"{where}: {' '.join(refusal.messages)}") from refusal


def write_rows(*, classes: Sequence[ClassPolicy] = (), cells: Sequence[TenantClassPolicy] = ()) -> None:
    """The rows behind a policy version; ``record_policy`` follows in the same transaction. Raises ValidationError."""
    for row in _rows(classes, cells):
        row.full_clean(validate_unique=False, validate_constraints=False)
        with checked_by_the_database(type(row), alias()):
            row.save()
    floors = sum(PriorityClass.objects.values_list("floor_percent", flat=True))
    if floors > MAX_FLOORS_PERCENT:
        raise ValidationError(f"the floors of all classes together are {floors} %, more than there is")


def _rows(classes: Sequence[ClassPolicy], cells: Sequence[TenantClassPolicy]) -> Iterator[QuotaPolicy | PriorityClass]:
    """Those that stand, or new ones, with what is to stand in them."""
    for cell in cells:
        place = {"tenant_id": UUID(cell.tenant_id), "priority_class": cell.priority_class.label}
        found = QuotaPolicy.objects.filter(**place).first() or QuotaPolicy(**place)
        _fill(found, cell, "tenant_id", "priority_class")
        found.overflow_to = found.overflow_to or ""
        found.is_paused = found.is_paused and cell.allowed  # a pause ends with the grant, and by no edit else
        found.allowed = cell.allowed and not found.is_paused
        yield found
    for policy in classes:
        label = policy.priority_class.label
        row = PriorityClass.objects.filter(label=label).first() or PriorityClass(label=label)
        _fill(row, policy, "priority_class")
        yield row


def _fill(row: QuotaPolicy | PriorityClass, policy: TenantClassPolicy | ClassPolicy, *names_of_the_row: str) -> None:
    for one in fields(policy):
        if one.name not in names_of_the_row:
            value = getattr(policy, one.name)
            setattr(row, one.name, value.label if isinstance(value, ClassName) else value)


def publish_policy() -> None:
    """Tells gateways and workers the newest policy and prices. Harmless to repeat.

    Reads and tells under the policy lock, so that an older version is never told after a newer one.
    """
    with transaction.atomic():
        serialise_policy_edits()
        document = import_string(settings.RUBATO_POLICY_DOCUMENT)()
        import_string(settings.RUBATO_POLICY_PUBLISHER)(document)


def serialise_policy_edits() -> None:
    """Until the end of the transaction nobody else edits policy or prices."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_POLICY_LOCK])


def record_policy(actor: str, reason: str = "", prices: Sequence[Change] = ()) -> PolicyVersion:
    """The next version of the whole policy, told after commit. ``prices``: what becomes of them with it. Raises
    ValidationError where the engine would refuse it.
    """
    serialise_policy_edits()
    newest = selectors.current_policy()
    version = newest.version + 1 if newest else 1
    document = selectors.live_policy(version)
    try:
        snapshot_from_dict(granted(document))
    except PolicyError as refusal:
        raise ValidationError(str(refusal)) from refusal
    told = [asdict(change) for change in prices]
    saved = PolicyVersion(version=version, document=document, prices=told, actor=actor, reason=reason)
    saved.save(force_insert=True)
    transaction.on_commit(publish_policy, robust=True)
    return saved


def _tell_key_changed(public_id: str, is_asked_for: bool = False) -> News:
    """``is_asked_for``: a key with a role, which is looked up each time that it is sent."""
    news = News(is_told=is_asked_for)

    def tell() -> None:  # a named function: Django names what failed in its log
        import_string(settings.RUBATO_KEY_PUBLISHER)(public_id)
        news.is_told = True

    transaction.on_commit(tell, using=alias(), robust=True)
    return news
