"""The operator's forms: tenants, projects and keys, whose every change goes through a service; and people.

The policy is read here and edited at the policy desk alone, where an edit is seen, reasoned and, if need be, approved.
"""

from __future__ import annotations

import uuid
from dataclasses import fields as dataclass_fields
from typing import Any
from uuid import UUID

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.forms import AdminUserCreationForm, UserChangeForm
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from scheduler_engine.policy import ClassPolicy, TenantClassPolicy
from scheduler_engine.policy import PriorityClass as ClassName
from tenants import audit, services
from tenants.admin_forms import OneAtATime, Opened, OpenedWithReason
from tenants.admin_lists import Bounded, OfTenant
from tenants.checks import SENT_BEFORE
from tenants.forms import Once
from tenants.models import ApiKey, PolicyVersion, PriorityClass, Project, QuotaPolicy, Tenant
from tenants.news import LATEST
from tenants.user_names import free_name


def actor_of(request: HttpRequest) -> str:
    assert isinstance(request.user, AbstractBaseUser)  # the admin lets in nobody else
    return request.user.get_username()


class KeepRows(admin.ModelAdmin):  # type: ignore[type-arg]
    """Rows that a ledger or an audit refers to: nobody deletes them, and changes are on record with a request id."""

    paginator = Bounded
    show_full_result_count = False
    list_per_page = 50

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        with audit.request(f"req_{uuid.uuid4().hex}", request.POST.get("reason", "")):
            answer: HttpResponse = super().changeform_view(request, *args, **kwargs)
            return answer

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        with audit.request(f"req_{uuid.uuid4().hex}"):  # of an action
            return super().changelist_view(request, *args, **kwargs)


class ReadOnly(KeepRows):
    """Shown, never edited."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


AT_ONCE = (
    "What is saved here holds at once, and waits for no second person as edits of quotas and prices may: to switch a"
    " tenant off must not wait, to switch it on gives back what it had, and neither name nor zone changes a limit."
    f" Gateways that cannot be told follow {LATEST}. It stands in the policy's history and on the trail, with you and"
    " your reason."
)


@admin.register(Tenant)
class TenantAdmin(OneAtATime, KeepRows):
    list_display = ["name", "slug", "timezone", "is_active", "created_at"]
    search_fields = ["name", "slug"]

    def get_fieldsets(self, request: HttpRequest, obj: Tenant | None = None) -> Any:
        fields = ["slug", "name", "timezone", "is_active", *(["reason"] if obj else [])]
        return [(None, {"fields": fields, "description": AT_ONCE if obj else ""})]

    def get_form(self, request: HttpRequest, obj: Tenant | None = None, change: bool = False, **kwargs: Any) -> Any:
        own = {"form": OpenedWithReason} if change else {}
        return super().get_form(request, obj, change, **own | kwargs)

    def get_readonly_fields(self, request: HttpRequest, obj: Tenant | None = None) -> list[str]:
        return ["slug"] if obj else ["is_active"]

    def save_model(self, request: HttpRequest, obj: Tenant, form: forms.ModelForm[Tenant], change: bool) -> None:
        actor = actor_of(request)
        if change:
            services.update_tenant(
                actor=actor,
                tenant_id=obj.pk,
                name=obj.name,
                timezone=obj.timezone,
                is_active=obj.is_active,
                reason=form.cleaned_data["reason"],
            )
        else:
            made = services.create_tenant(actor=actor, slug=obj.slug, name=obj.name, timezone=obj.timezone)
            obj.pk = made.pk


@admin.register(Project)
class ProjectAdmin(OneAtATime, KeepRows):
    form = Opened
    list_display = ["name", "tenant", "default_class", "created_at"]
    list_filter = [OfTenant, "default_class"]
    list_select_related = ["tenant"]
    fields = ["tenant", "name", "default_class"]

    def get_readonly_fields(self, request: HttpRequest, obj: Project | None = None) -> list[str]:
        return ["tenant"] if obj else []

    def save_model(self, request: HttpRequest, obj: Project, form: forms.ModelForm[Project], change: bool) -> None:
        actor, default_class = actor_of(request), ClassName.from_label(obj.default_class)
        if change:
            services.update_project(actor=actor, project_id=obj.pk, name=obj.name, default_class=default_class)
        else:
            made = services.create_project(actor=actor, tenant=obj.tenant, name=obj.name, default_class=default_class)
            obj.pk = made.pk


class NewKeyForm(Once, forms.ModelForm):  # type: ignore[type-arg]
    """A key belongs to a project; its tenant is the project's."""

    class Meta:
        model = ApiKey
        fields = ["project", "name", "expires_at"]

    def clean_made_id(self) -> UUID | None:
        made_id: UUID | None = self.cleaned_data["made_id"]
        if made_id and ApiKey.objects.filter(id=made_id).exists():
            raise ValidationError(SENT_BEFORE)
        return made_id


@admin.register(ApiKey)
class ApiKeyAdmin(KeepRows):
    list_display = ["name", "tenant", "project", "shown_as", "created_at", "expires_at", "revoked_at", "last_used_at"]
    list_filter = [OfTenant, ("revoked_at", admin.EmptyFieldListFilter)]
    list_select_related = ["tenant", "project"]
    actions = ["revoke"]
    form = NewKeyForm

    @admin.display(description="key")
    def shown_as(self, key: ApiKey) -> str:
        return f"sk_…_{key.public_id}_…{key.last4}"

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return obj is None and super().has_change_permission(request)  # the list and its action, no edit page

    def save_model(self, request: HttpRequest, obj: ApiKey, form: forms.ModelForm[ApiKey], change: bool) -> None:
        issued = services.issue_key(
            actor=actor_of(request),
            project=obj.project,
            name=obj.name,
            env=settings.RUBATO_KEY_ENVIRONMENT,
            expires_at=obj.expires_at,
            key_id=form.cleaned_data["made_id"],
        )
        obj.pk = issued.key.pk
        self.message_user(request, f"Copy this key now, it is never shown again: {issued.text}", messages.WARNING)

    @admin.action(description="Revoke the selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, keys: QuerySet[ApiKey]) -> None:
        for key in keys:
            news = services.revoke_key(actor=actor_of(request), key_id=key.pk)
            said = news.of_the_end_of(key.name) if news else f"{key.name} had ended before."
            self.message_user(request, said, messages.ERROR if news and not news.is_told else messages.SUCCESS)


CLASS_FIELDS = [field.name for field in dataclass_fields(ClassPolicy) if field.name != "priority_class"]
CELL_FIELDS = [
    field.name for field in dataclass_fields(TenantClassPolicy) if field.name not in ("tenant_id", "priority_class")
]


@admin.register(PriorityClass)
class PriorityClassAdmin(ReadOnly):
    list_display = ["label", "ttft_target_ms", "tbt_target_ms", "max_queue_wait_ms", "floor_percent"]
    fields = ["label", *CLASS_FIELDS]


@admin.register(QuotaPolicy)
class QuotaPolicyAdmin(ReadOnly):
    """The matrix tenant x class. An empty field is no limit, 0 is nothing allowed."""

    list_display = [
        *(
            "tenant",
            "priority_class",
            "allowed",
            "is_paused",
            "weight",
            "requests_per_minute",
            "tokens_per_minute",
            "concurrency",
        ),
        *("money_micros", "money_window", "max_tokens_cap", "hard_deadline_ms", "overflow_to"),
    ]
    list_filter = [OfTenant, "priority_class", "allowed"]
    list_select_related = ["tenant"]
    fields = ["tenant", "priority_class", *CELL_FIELDS]


@admin.register(PolicyVersion)
class PolicyVersionAdmin(ReadOnly):
    list_display = ["version", "actor", "created_at"]


class Called:
    """Mixed into the forms of people. Always: a name that is given is free, for the trail too."""

    def clean_username(self: Any) -> str:
        username = str(self.cleaned_data["username"])
        if "username" in self.changed_data:
            free_name(username, taken="A user with that username already exists.", user_id=self.instance.pk or 0)
        return username


class NewPersonForm(Called, AdminUserCreationForm):  # type: ignore[type-arg]
    pass


class PersonForm(Called, UserChangeForm):  # type: ignore[type-arg]
    pass


admin.site.unregister(User)


@admin.register(User)
class PersonAdmin(UserAdmin):  # type: ignore[type-arg]
    form = PersonForm
    add_form = NewPersonForm
