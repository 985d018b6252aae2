"""The wiring under every other database test: three aliases, three roles, one database, empty at each start."""

from __future__ import annotations

import os
import socket

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import ProgrammingError, connections


def _role_behind(alias: str) -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_user")
        return str(cursor.fetchone()[0])


@pytest.mark.parametrize(("alias", "role"), [("default", "app_ops"), ("tenant", "app_rw"), ("owner", "app_owner")])
def test_each_alias_connects_as_its_own_role(db: None, alias: str, role: str) -> None:
    assert _role_behind(alias) == role


@pytest.mark.parametrize("attempt", [1, 2])
def test_rows_of_one_test_are_gone_in_the_next(db: None, attempt: int) -> None:
    assert User.objects.count() == 0
    User.objects.create_user("somebody")


@pytest.mark.parametrize("attempt", [1, 2])
def test_committed_rows_of_one_test_are_gone_in_the_next(transactional_db: None, attempt: int) -> None:
    assert User.objects.count() == 0
    User.objects.create_user("somebody")
    assert User.objects.using("owner").count() == 1  # another connection sees it: it is committed


@pytest.mark.django_db
def test_the_tenant_role_cannot_read_accounts() -> None:
    with pytest.raises(ProgrammingError, match="permission denied"):
        User.objects.using("tenant").count()


def test_tests_never_point_at_the_services_of_a_running_up(db: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert settings.REDIS_URL.startswith("redis://127.0.0.1:1/")
    assert "pool" in settings.DATABASES["default"]["OPTIONS"]


def test_no_connection_outlives_its_request_outside_of_a_bounded_pool() -> None:  # P72
    """Under ASGI a connection that is kept by age is kept by its thread, and never comes back."""
    for alias, database in settings.DATABASES.items():
        assert database["CONN_MAX_AGE"] == 0, alias
    for alias in ("default", "tenant"):
        assert 1 <= settings.DATABASES[alias]["OPTIONS"]["pool"]["max_size"] <= 16


@pytest.mark.django_db
def test_a_host_that_is_gone_without_a_word_is_left_after_ten_seconds() -> None:
    for alias in connections:
        connection = connections[alias]
        connection.ensure_connection()
        with socket.socket(fileno=os.dup(connection.connection.fileno())) as line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000, alias
