"""The admin's site, as Django is told of it by ``admin_config``. Knows no table."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from tenants.admin_forms import RefusedInWords


class Site(admin.AdminSite):
    """Always: every form of it, of libraries too, is ``RefusedInWords``."""

    def register(self, model_or_iterable: Any, admin_class: Any = None, **options: Any) -> None:
        own = admin_class or admin.ModelAdmin
        told = type(own.__name__, (RefusedInWords, own), {"__module__": own.__module__})
        super().register(model_or_iterable, told, **options)
