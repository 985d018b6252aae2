"""What the management API answers with, field by field: the rows' own serializers, and with them the schema.

Knows OpenAI's names for things; refuses to know who may see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from drf_spectacular.drainage import set_override
from rest_framework import serializers

from billing.usage import LineItem
from tenants.models import CLASS_LABELS, ApiKey, AuditEvent
from tenants.news import LATEST
from tenants.roles import Role

LABELS = [(label, label) for label in CLASS_LABELS]
KEY = "organization.project.api_key"
_UNTOLD = f"false where gateways could not be told of it: they follow {LATEST}"
ROLES = [(role.value, role.value) for role in Role]


# A shape's docstring is published with it, so its base has none. Always: every field is in every answer.
class Shape(serializers.Serializer[Any]): ...


class Word(serializers.Field[Any, Any, Any, Any]):
    """Always this word."""

    def __init__(self, word: str) -> None:
        super().__init__(source="*", read_only=True)
        self._word = word
        set_override(self, "field", {"type": "string", "enum": [word]})

    def to_representation(self, value: Any) -> str:
        return self._word


class Seconds(serializers.Field[Any, Any, Any, Any]):
    """A moment in whole Unix seconds."""

    def __init__(self, **given: Any) -> None:
        super().__init__(read_only=True, **given)
        set_override(self, "field", {"type": "integer"})

    def to_representation(self, value: Any) -> int:
        return int(value.timestamp())


class MaybeSeconds(Seconds):
    """The same, or null where it has not come."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_null=True, **given)


class ProjectShape(Shape):
    id = serializers.UUIDField()
    object = Word("organization.project")
    name = serializers.CharField()
    default_class = serializers.CharField()
    created_at = Seconds()
    status = Word("active")


class KeyShape(Shape):
    id = serializers.UUIDField()
    object = Word(KEY)
    name = serializers.CharField()
    project_id = serializers.UUIDField()
    redacted_value = serializers.SerializerMethodField()
    role = serializers.SerializerMethodField(help_text="of a management key; null where it opens inference")
    created_at = Seconds()
    created_by = serializers.CharField()
    expires_at = MaybeSeconds()
    last_used_at = MaybeSeconds(help_text="noted once a minute: a key used just now may not show it yet")
    rotated_at = MaybeSeconds()
    previous_secret_until = MaybeSeconds(source="previous_until")
    revoked_at = MaybeSeconds()

    def get_redacted_value(self, row: ApiKey) -> str:
        return f"sk_…_{row.public_id}_…{row.last4}"

    def get_role(self, row: ApiKey) -> str | None:
        return row.role or None


class NewKeyShape(KeyShape):
    value = serializers.CharField(help_text="the whole key, shown this once")


class RotatedKeyShape(NewKeyShape):
    gateways_told = serializers.BooleanField(help_text=_UNTOLD)


class DeletedKeyShape(Shape):
    id = serializers.UUIDField()
    object = Word(f"{KEY}.deleted")
    deleted = serializers.BooleanField()
    gateways_told = serializers.BooleanField(allow_null=True, help_text=f"{_UNTOLD}; null where it had ended before")


class MemberShape(Shape):
    id = serializers.UUIDField()
    object = Word("organization.user")
    email = serializers.CharField()
    role = serializers.CharField()
    added_at = Seconds(source="created_at")


class InvitationShape(Shape):
    id = serializers.UUIDField()
    object = Word("organization.invite")
    email = serializers.CharField()
    role = serializers.CharField()
    invited_by = serializers.CharField()
    created_at = Seconds()
    expires_at = Seconds()


class NewInvitationShape(InvitationShape):
    token = serializers.CharField(help_text="ends the link that is sent, shown this once")


class EventShape(Shape):
    id = serializers.CharField()
    object = Word("organization.audit_log")
    type = serializers.SerializerMethodField()
    effective_at = Seconds(source="at")
    object_id = serializers.CharField()
    actor = serializers.CharField()
    reason = serializers.CharField()
    request_id = serializers.CharField()
    before = serializers.DictField(child=serializers.JSONField(), allow_null=True)
    after = serializers.DictField(child=serializers.JSONField(), allow_null=True)

    def get_type(self, row: AuditEvent) -> str:
        return f"{row.object_type}.{row.action}"


class StatementShape(Shape):
    """Without its lines, as in a list."""

    id = serializers.UUIDField()
    object = Word("organization.statement")
    day = serializers.DateField()
    timezone = serializers.CharField(source="zone")
    starts_at = Seconds()
    ends_at = Seconds()
    charged_micros = serializers.IntegerField()
    adjusted_micros = serializers.IntegerField()
    credited_micros = serializers.IntegerField()
    total_micros = serializers.IntegerField()
    currency = serializers.SerializerMethodField()

    def get_currency(self, row: Any) -> str:
        currency: str = settings.RUBATO_CURRENCY
        return currency


class WholeStatementShape(StatementShape):
    lines = serializers.ListField(child=serializers.DictField(child=serializers.JSONField()))
    corrections = serializers.ListField(child=serializers.DictField(child=serializers.JSONField()))


class Grouped(Shape):
    """Each is null unless the answer was asked for in groups of it, and for what belongs to none."""

    project_id = serializers.CharField(allow_null=True)
    api_key_id = serializers.CharField(allow_null=True)
    model = serializers.CharField(allow_null=True)
    service_tier = serializers.CharField(allow_null=True)


class UsageResult(Grouped):
    object = Word("organization.usage.completions.result")
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    input_cached_tokens = serializers.IntegerField()
    input_audio_tokens = serializers.IntegerField()
    output_audio_tokens = serializers.IntegerField()
    num_model_requests = serializers.IntegerField()
    num_downgraded_requests = serializers.IntegerField()
    user_id = serializers.CharField(allow_null=True)
    batch = serializers.BooleanField(allow_null=True)
    charged = serializers.BooleanField(
        allow_null=True,
        help_text="false: used, and not charged; null, for all that was used, unless asked for in groups of it",
    )


class Amount(Shape):
    value = serializers.FloatField()
    currency = serializers.CharField()


class CostResult(Grouped):
    object = Word("organization.costs.result")
    amount = Amount()
    cost_micros = serializers.IntegerField(
        help_text="what the ledger holds, below 0 where more was given back; amount.value is this in whole units"
    )
    line_item = serializers.ChoiceField(
        choices=list(LineItem), allow_null=True, help_text="null, for all together, unless asked for in groups of it"
    )


def deleted(kind: str) -> type[Shape]:
    return _made(f"Deleted {kind}", id=serializers.UUIDField, object=lambda: Word(f"{kind}.deleted"), deleted=_boolean)


def listing(shape: type[Shape]) -> type[Shape]:
    """OpenAI's list of them."""
    name = {"first_id": _maybe_text, "last_id": _maybe_text}
    rows = {"object": lambda: Word("list"), "data": lambda: shape(many=True), **name, "has_more": _boolean}
    return _made(f"List of {shape.__name__}", **rows)


def buckets_of(result: type[Shape]) -> type[Shape]:
    """A page of buckets of time, each with its results."""
    bucket = _made(
        f"Bucket of {result.__name__}",
        object=lambda: Word("bucket"),
        start_time=serializers.IntegerField,
        end_time=serializers.IntegerField,
        results=lambda: result(many=True),
    )
    rows = {"object": lambda: Word("page"), "data": lambda: bucket(many=True)}
    return _made(f"Page of {result.__name__}", **rows, has_more=_boolean, next_page=_maybe_text)


def _made(words: str, **fields: Callable[[], Any]) -> type[Shape]:
    name = "".join(part[0].upper() + part[1:] for part in words.replace(".", " ").replace("_", " ").split())
    made: type[Shape] = type(name, (Shape,), {field: make() for field, make in fields.items()})
    return made


def _maybe_text() -> Any:
    return serializers.CharField(allow_null=True)


def _boolean() -> Any:
    return serializers.BooleanField()
