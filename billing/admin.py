"""The operator's view of the books: prices editable as new versions, everything else to be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from billing import selectors, services
from billing.models import EngineCount, LedgerAlert, LedgerEntry, Price, Rollup, UsageRequest
from tenants.admin import KeepRows, ReadOnly, actor_of
from tenants.models import Tenant


class OfTenants(ReadOnly):
    """Rows that name a tenant. Fetched beside it, not joined: a row whose tenant is unknown must show, too."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).prefetch_related("tenant")

    @admin.display(description="tenant", ordering="tenant_id")
    def of_tenant(self, row: Any) -> str:
        try:
            return str(row.tenant)
        except Tenant.DoesNotExist:
            return f"unknown: {row.tenant_id}"


@admin.register(Price)
class PriceAdmin(KeepRows):
    """The list in force. Saving a price makes the next version; operations reserved before keep theirs."""

    list_display = ["model", "priority_class", "token_kind", "micros_per_million"]
    list_filter = ["model", "priority_class"]
    fields = ["model", "priority_class", "token_kind", "micros_per_million"]
    readonly_fields = ["model", "priority_class", "token_kind"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Price]:
        return super().get_queryset(request).filter(price_version=selectors.current_price_version())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Price, form: forms.ModelForm[Price], change: bool) -> None:
        place = (obj.model, obj.priority_class)
        current = selectors.price_list(selectors.current_price_version()).prices[place]
        edited = replace(current, **{obj.token_kind: obj.micros_per_million})
        version = services.set_prices(actor=actor_of(request), prices={place: edited})
        self.message_user(request, f"Price version {version.version} holds for new requests.", messages.SUCCESS)

    def response_change(self, request: HttpRequest, obj: Price) -> Any:
        """Back to the list: the row just edited belongs to an older version now."""
        return self.response_post_save_change(request, obj)


@admin.register(UsageRequest)
class UsageRequestAdmin(OfTenants):
    list_display = [
        *("id", "of_tenant", "priority_class", "model", "state", "prompt_tokens", "output_tokens", "cost_micros"),
        *("reserved_micros", "reserved_at", "ended_at"),
    ]
    list_filter = ["state", "priority_class", "tenant"]
    show_full_result_count = False
    search_fields = ["id"]


@admin.register(LedgerEntry)
class LedgerEntryAdmin(OfTenants):
    list_display = [
        *("id", "operation_id", "kind", "of_tenant", "amount_micros", "prompt_tokens", "output_tokens"),
        *("reason", "actor", "created_at"),
    ]
    list_filter = ["kind", "tenant"]
    show_full_result_count = False
    search_fields = ["operation_id"]


@admin.register(Rollup)
class RollupAdmin(OfTenants):
    list_display = [
        *("hour", "of_tenant", "priority_class", "model", "num_requests", "prompt_tokens", "output_tokens"),
        "cost_micros",
    ]
    list_filter = ["tenant", "priority_class", "model"]


@admin.register(EngineCount)
class EngineCountAdmin(ReadOnly):
    list_display = ["worker_id", "epoch", "prompt_tokens", "output_tokens", "rework_output_tokens", "seen_at"]


@admin.register(LedgerAlert)
class LedgerAlertAdmin(ReadOnly):
    list_display = ["reason", "subject", "created_at", "closed_at", "closed_by"]
    list_filter = ["reason", ("closed_at", admin.EmptyFieldListFilter)]
    actions = ["close"]

    @admin.action(description="Close the selected alerts: looked into")
    def close(self, request: HttpRequest, found: QuerySet[LedgerAlert]) -> None:
        closed = sum(services.close_alert(actor=actor_of(request), alert_id=alert.pk) for alert in found)
        self.message_user(request, f"{closed} alerts closed.", messages.SUCCESS)
