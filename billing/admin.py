"""The operator's view of the books, all of it to be read; corrections are added."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import path, reverse
from django.utils.html import format_html_join

from billing import documents, selectors, services
from billing.models import EngineCount, LedgerAlert, LedgerEntry, Price, Rollup, Statement, UsageRequest
from tenants.admin import ReadOnly, actor_of
from tenants.admin_lists import OfClass, OfTenant
from tenants.forms import Once, WholeNumber
from tenants.models import Tenant
from tenants.models.words import one_direction


class OfTenants(ReadOnly):
    """Rows that name a tenant. Fetched beside it, not joined: a row whose tenant is unknown must show, too.

    ``search_fields`` of theirs are columns of ids: a whole one is looked up, and nothing is searched for.
    """

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).prefetch_related("tenant")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if not search_term:
            return queryset, False
        try:
            wanted = uuid.UUID(search_term.strip())
        except ValueError:
            return queryset.none(), False
        return queryset.filter(**{str(self.search_fields[0]): wanted}), False

    @admin.display(description="tenant", ordering="tenant_id")
    def of_tenant(self, row: Any) -> str:
        try:
            return str(row.tenant)
        except Tenant.DoesNotExist:
            return f"unknown: {row.tenant_id}"


@admin.register(Price)
class PriceAdmin(ReadOnly):
    """The list in force, and by its address a price of any version. They are edited at the policy desk alone, where an
    edit is seen before it is saved; its history is there, too.
    """

    list_display = ["model", "priority_class", "token_kind", "micros_per_million"]
    list_filter = ["model", "priority_class"]
    fields = ["price_version", "model", "priority_class", "token_kind", "micros_per_million"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Price]:
        found = super().get_queryset(request)
        match = request.resolver_match
        is_list = match is not None and "object_id" not in match.kwargs
        return found.filter(price_version=selectors.current_price_version()) if is_list else found


@admin.register(UsageRequest)
class UsageRequestAdmin(OfTenants):
    list_display = [
        *("id", "of_tenant", "priority_class", "model", "state", "prompt_tokens", "output_tokens", "cost_micros"),
        *("reserved_micros", "reserved_at", "ended_at"),
    ]
    list_filter = ["state", OfClass, OfTenant]
    search_fields = ["id"]
    search_help_text = "a whole id"


class CorrectionForm(Once, forms.ModelForm):  # type: ignore[type-arg]
    """The two entries that people write: an adjustment names its operation, a credit its tenant."""

    operation_id = forms.UUIDField(required=False, help_text="whose charge is repaired; empty for a credit")
    tenant = forms.ModelChoiceField(Tenant.objects.all(), required=False, help_text="whom a credit is for")
    amount_micros = WholeNumber(
        help_text="an adjustment above 0 is charged, one below takes back, at most what is charged; a credit is above 0"
    )
    reason = forms.CharField(max_length=120, validators=[one_direction])

    class Meta:
        model = LedgerEntry
        fields = ("operation_id", "tenant", "amount_micros", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():  # else a browser that goes back fills in what has been booked
            field.widget.attrs["autocomplete"] = "off"

    def clean(self) -> dict[str, Any]:
        found = super().clean() or {}
        if not found.get("made_id"):
            return found
        services.one_at_a_time(found["made_id"])
        booked = selectors.correction_of(found["made_id"])
        if booked is not None:
            raise ValidationError(
                f"This form was sent before: it booked entry {booked.pk}, {booked.amount_micros:,} micro-units"
                f" ({booked.reason}), and nothing was booked again. For another one open a new form."
            )
        operation_id, tenant, amount = (found.get(name) for name in ("operation_id", "tenant", "amount_micros"))
        if bool(operation_id) == bool(tenant):
            raise ValidationError("Name an operation (to adjust its charge) or a tenant (to give a credit), not both.")
        try:
            if amount is not None and tenant:
                services.refuse_credit(amount_micros=amount)
            elif operation_id and amount is not None:
                services.refuse_adjustment(operation_id=operation_id, amount_micros=amount)
        except ValidationError as refusal:
            self.add_error(None, refusal)
        return found

    def _post_clean(self) -> None:
        """The entry is the service's to make and to check; here it is no model instance yet."""


@admin.register(LedgerEntry)
class LedgerEntryAdmin(OfTenants):
    list_display = [
        *("id", "operation_id", "kind", "of_tenant", "amount_micros", "prompt_tokens", "output_tokens"),
        *("reason", "actor", "created_at"),
    ]
    list_filter = ["kind", OfTenant]
    search_fields = ["operation_id"]
    search_help_text = "a whole id of an operation"
    form = CorrectionForm

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super(ReadOnly, self).has_add_permission(request)

    def save_model(self, request: HttpRequest, obj: LedgerEntry, form: CorrectionForm, change: bool) -> None:
        data, actor = form.cleaned_data, actor_of(request)
        amount, reason, made_id = data["amount_micros"], data["reason"], str(data["made_id"])
        if data["tenant"]:
            tenant_id = data["tenant"].pk
            made = services.credit(
                actor=actor, tenant_id=tenant_id, amount_micros=amount, reason=reason, credit_id=made_id
            )
        else:
            operation_id = data["operation_id"]
            made = services.adjust(
                actor=actor, operation_id=operation_id, amount_micros=amount, reason=reason, adjustment_id=made_id
            )
        for field in LedgerEntry._meta.concrete_fields:
            setattr(obj, field.attname, getattr(made, field.attname))


@admin.register(Rollup)
class RollupAdmin(OfTenants):
    list_display = [
        *("hour", "of_tenant", "priority_class", "model", "is_charged", "num_requests", "prompt_tokens"),
        *("output_tokens", "cost_micros"),
    ]
    list_filter = [OfTenant, OfClass, "is_charged"]


@admin.register(EngineCount)
class EngineCountAdmin(ReadOnly):
    list_display = ["worker_id", "epoch", "prompt_tokens", "output_tokens", "rework_output_tokens", "seen_at"]


@admin.register(LedgerAlert)
class LedgerAlertAdmin(ReadOnly):
    list_display = ["reason", "subject", "created_at", "closed_at", "closed_by"]
    list_filter = ["reason", ("closed_at", admin.EmptyFieldListFilter)]
    actions = ["close"]

    def has_close_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("billing.change_ledgeralert")

    @admin.action(description="Close the selected alerts: looked into", permissions=["close"])
    def close(self, request: HttpRequest, found: QuerySet[LedgerAlert]) -> None:
        closed = sum(services.close_alert(actor=actor_of(request), alert_id=alert.pk) for alert in found)
        self.message_user(request, f"{closed} alerts closed.", messages.SUCCESS)


@admin.register(Statement)
class StatementAdmin(OfTenants):
    """Closed days, each with its two files."""

    list_display = ["day", "of_tenant", "charged", "adjusted", "credited", "total", "files"]
    list_filter = [OfTenant]

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.download)
        return [
            path("<uuid:statement_id>/statement.<str:kind>", view, name="billing_statement_file"),
            *super().get_urls(),
        ]

    def download(self, request: HttpRequest, statement_id: uuid.UUID, kind: str) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        statement = get_object_or_404(Statement, id=statement_id)
        try:
            file = documents.statement_file(statement, kind, tenant_name=self.of_tenant(statement))
        except ValueError as error:
            raise Http404(str(error)) from error
        body, content_type, name = file
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return HttpResponse(body, content_type=content_type, headers=headers)

    @admin.display(description="charged")
    def charged(self, row: Statement) -> str:
        return documents.money(row.charged_micros)

    @admin.display(description="adjusted")
    def adjusted(self, row: Statement) -> str:
        return documents.money(row.adjusted_micros)

    @admin.display(description="credited")
    def credited(self, row: Statement) -> str:
        return documents.money(row.credited_micros)

    @admin.display(description="total")
    def total(self, row: Statement) -> str:
        return documents.money(row.total_micros)

    @admin.display(description="files")
    def files(self, row: Statement) -> str:
        links = [
            (reverse("admin:billing_statement_file", args=[row.id, kind]), kind.upper()) for kind in ("csv", "pdf")
        ]
        return format_html_join(" ", '<a href="{}">{}</a>', links)
