"""The three database roles as Django aliases, and who of them may migrate.

``default`` is app_ops (admin, settler, look-ups before a tenant is known), ``tenant`` is app_rw under row-level
security, ``owner`` is app_owner and only migrates. All three address one database.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model

from tenants.isolation import alias

WALLED_APPS = frozenset({"tenants", "billing", "gateway", "webhooks"})
ALIASES = {"default": "DATABASE_URL", "tenant": "DATABASE_TENANT_URL", "owner": "DATABASE_OWNER_URL"}
# A server that takes a connection and says nothing is left after 5 s, a host that is gone without a word after 10 s, in
# which it confirmed nothing. The URL may say otherwise.
PATIENCE = {"connect_timeout": 5, "tcp_user_timeout": 10_000}


def database_settings(urls: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Django's DATABASES. ``urls`` is by alias; an alias without one gets a backend that refuses every use."""
    return {alias: _one(alias, urls.get(alias, "")) for alias in ALIASES}


def pool_size() -> int:
    """Connections that one process may hold per role; a process of ``manage.py up`` needs few."""
    return int(os.environ.get("DATABASE_POOL_SIZE", "4"))


def _one(alias: str, url: str) -> dict[str, Any]:
    # In tests all tables are emptied by their owner, since the other two roles may not truncate.
    test = {} if alias == "owner" else {"MIRROR": "owner"}
    if not url:
        return {"ENGINE": "django.db.backends.dummy", "TEST": test}
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql") or not parts.path.strip("/"):
        raise ImproperlyConfigured(f"{ALIASES[alias]} must look like postgresql://role:password@host:5432/database.")
    options: dict[str, Any] = PATIENCE | dict(parse_qsl(parts.query))
    if alias != "owner":
        options["pool"] = {"max_size": pool_size()}
    return {
        "ENGINE": "gateway.postgresql",
        "NAME": parts.path.strip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "CONN_MAX_AGE": 0,
        "OPTIONS": options,
        "TEST": test,
    }


class OwnerMigrates:
    """Database router. Always: tables are made and changed by their owner alone; every alias is the same database;
    inside ``with tenant(…)`` our own tables are read and written behind the wall.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return alias() if model._meta.app_label in WALLED_APPS else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool:
        return db == "owner"

    def allow_relation(self, first: Model, second: Model, **hints: Any) -> bool:
        return True
