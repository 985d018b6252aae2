"""The world that tests run in: an embedded PostgreSQL and Valkey of their own, started by the first test that asks.

Nothing of a running ``manage.py up`` is ever touched: the addresses found in the data folder are thrown away first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import TransactionTestCase
from pytest_django import DjangoDbBlocker, Settings

from gateway.databases import ALIASES, database_settings
from gateway.embedded import EmbeddedPostgres, EmbeddedValkey, running

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported, by whomever

UNREACHABLE = "127.0.0.1:1"
_ROLE_OF_ALIAS = {"default": "app_ops", "tenant": "app_rw", "owner": "app_owner"}


def _point_django_at(urls: dict[str, str], redis_url: str) -> None:
    """Change the settings in place; Django was set up before any fixture could run."""
    for alias, fresh in connections.configure_settings(database_settings(urls)).items():
        settings.DATABASES[alias].update(fresh)
    for made_earlier in connections.all(initialized_only=True):
        del connections[made_earlier.alias]
    settings.REDIS_URL = settings.CELERY_BROKER_URL = redis_url
    settings.CHANNEL_LAYERS["default"]["CONFIG"]["hosts"][0]["address"] = redis_url


class Migrated:
    """The tables of all models. Always: after ``restore`` they hold what migrations made, and nothing else."""

    _KEPT = frozenset({"django_content_type", "auth_permission"})  # no test changes them

    def __init__(self) -> None:
        self._owner = connections["owner"]
        names = self._owner.introspection.django_table_names(only_existing=True, include_views=False)
        self._names = sorted(set(names) - self._KEPT)
        with self._owner.cursor() as cursor:
            self._made = {name: self._rows(cursor, name) for name in self._used(cursor)}

    def restore(self) -> None:
        """In place of Django's flush, which empties every table, what migrations made too, and makes all content types
        and permissions again.
        """
        with self._owner.cursor() as cursor:
            if used := self._used(cursor):
                cursor.execute(f"TRUNCATE {', '.join(used)} CASCADE")
            for name, rows in self._made.items():
                values = f"({', '.join(['%s'] * len(rows[0]))})"
                cursor.execute(f"ALTER TABLE {name} DISABLE TRIGGER USER")  # the trail is not told
                cursor.executemany(f"INSERT INTO {name} VALUES {values}", rows)
                cursor.execute(f"ALTER TABLE {name} ENABLE TRIGGER USER")

    def _used(self, cursor: Any) -> list[str]:
        """A table without a page holds no row, whoever may see its rows."""
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relname = ANY(%s) AND relkind = 'r' AND pg_relation_size(oid) > 0",
            [self._names],
        )
        return sorted(name for (name,) in cursor.fetchall())

    @staticmethod
    def _rows(cursor: Any, name: str) -> list[Any]:
        cursor.execute(f"TABLE {name}")
        return list(cursor.fetchall())


def pytest_configure() -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.WHITENOISE_AUTOREFRESH = True  # files are looked for when asked for, and not by every new Client
    _point_django_at(
        {alias: f"postgresql://{role}@{UNREACHABLE}/none" for alias, role in _ROLE_OF_ALIAS.items()},
        f"redis://{UNREACHABLE}/0",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses the database may use it in all three roles."""
    for item in items:
        marker = item.get_closest_marker("django_db")
        names = getattr(item, "fixturenames", ())
        if marker is None and "transactional_db" in names:
            item.add_marker(pytest.mark.django_db(transaction=True, databases="__all__"), append=False)
        elif marker is not None or "db" in names:
            keywords = {"databases": "__all__", **(marker.kwargs if marker else {})}
            item.add_marker(pytest.mark.django_db(**keywords), append=False)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server with an empty database and the three roles; tests of Django code want ``db`` or ``transactional_db``."""
    folder = tmp_path_factory.mktemp("postgres")
    server = EmbeddedPostgres(folder, durable=False)
    with running(server, folder / "log"):
        yield server


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the session's own. Tests share it: use a key prefix of your own, or ``flushdb`` before."""
    folder = tmp_path_factory.mktemp("valkey")
    server = EmbeddedValkey(folder)
    with running(server, folder / "log"):
        yield server.url


@pytest.fixture(scope="session")
def database_urls(postgres: EmbeddedPostgres) -> dict[str, str]:
    """URL per Django alias, for code that connects by itself."""
    return {alias: postgres.url(role) for alias, role in _ROLE_OF_ALIAS.items()}


@pytest.fixture(scope="session")
def migrated(
    django_test_environment: None, django_db_blocker: DjangoDbBlocker, database_urls: dict[str, str]
) -> Migrated:
    """Tables made by app_owner."""
    from django.core.management import call_command

    _point_django_at(database_urls, settings.REDIS_URL)
    with django_db_blocker.unblock():
        call_command("migrate", database="owner", verbosity=0)
        return Migrated()


@pytest.fixture(scope="session")
def django_db_setup(migrated: Migrated, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Tests run as app_ops (alias default) and app_rw (alias tenant).

    Two aliases are two connections: a test that writes with one and reads with the other wants ``transactional_db``.
    """
    with django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", lambda _: migrated.restore())
        yield
        for connection in connections.all():
            connection.close()
            connection.close_pool()


@pytest.fixture
def valkey(valkey_url: str, settings: Settings) -> str:
    """An empty Valkey that Django's settings point at."""
    import redis

    with redis.Redis.from_url(valkey_url) as client:
        client.flushdb()
    settings.REDIS_URL = valkey_url
    return valkey_url


@pytest.fixture
def service_environment(transactional_db: None, database_urls: dict[str, str], valkey: str) -> dict[str, str]:
    """Environment for a subprocess (``manage.py …``) that shall use the test's own services."""
    urls = {name: database_urls[alias] for alias, name in ALIASES.items()}
    return {**os.environ, **urls, "REDIS_URL": valkey, "DJANGO_SETTINGS_MODULE": "gateway.settings"}


@pytest.fixture(scope="session")
def project_root() -> Path:
    return Path(__file__).resolve().parent.parent
