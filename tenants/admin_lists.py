"""Lists of the admin that stay quick and small however many rows and tenants there are. Knows no table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from tenants.models import CLASS_CHOICES, Tenant

MOST_COUNTED = 10_000  # rows of one list; who looks for an older one filters


class Bounded(Paginator):  # type: ignore[type-arg]
    """Always: counts at most MOST_COUNTED rows, and shows no more pages than they fill."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return int(rows[:MOST_COUNTED].count())


class OfTenant(admin.SimpleListFilter):
    """A box for a tenant's slug, where the library would write a link for every tenant there is."""

    title = "tenant"
    parameter_name = "tenant"
    template = "admin/of_tenant.html"

    def has_output(self) -> bool:
        return True

    def lookups(self, request: HttpRequest, model_admin: Any) -> tuple[()]:
        return ()

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        slug = self.value()
        if not slug:
            return queryset
        return queryset.filter(tenant_id__in=Tenant.objects.filter(slug=slug).values_list("id"))

    def choices(self, changelist: Any) -> Iterator[Any]:
        """What the template needs: the slug that is asked for, and the other filters, which stay."""
        others = {name: value for name, value in changelist.params.items() if name not in ("tenant", "p")}
        kept = [(name, value[-1] if isinstance(value, list) else value) for name, value in others.items()]
        yield {"slug": self.value() or "", "kept": kept}


class OfClass(admin.SimpleListFilter):
    """The three classes, where the library would look through all rows for the names that occur."""

    title = "class"
    parameter_name = "priority_class"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(CLASS_CHOICES)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(priority_class=self.value()) if self.value() else queryset
