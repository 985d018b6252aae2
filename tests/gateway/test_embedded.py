"""Promises of the embedded servers: roles without power, state that survives, no half-made cluster."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import psycopg
import pytest

from gateway.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedValkey, running
from gateway.embedded.service import kept_port, kept_secret, port_is_free


def test_no_role_that_can_log_in_is_a_superuser_or_passes_row_level_security(postgres: EmbeddedPostgres) -> None:
    query = "SELECT rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname LIKE 'app%'"
    with psycopg.connect(postgres.url("app_owner")) as connection:
        rows = connection.execute(query).fetchall()
    assert sorted(rows) == [(name, False, False, False, False) for name in ("app_ops", "app_owner", "app_rw")]


def test_the_superuser_cannot_log_in_at_all(postgres: EmbeddedPostgres) -> None:
    as_superuser = postgres.url("app_ops").replace("app_ops:", "postgres:")
    with pytest.raises(psycopg.OperationalError, match=r"pg_hba\.conf"):
        psycopg.connect(as_superuser)


def test_a_wrong_password_is_refused(postgres: EmbeddedPostgres) -> None:
    swapped = postgres.url("app_ops").replace("app_ops:", "app_rw:")
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(swapped)


def test_a_new_table_is_open_to_app_ops_and_closed_to_app_rw(postgres: EmbeddedPostgres) -> None:
    with psycopg.connect(postgres.url("app_owner")) as owner:
        owner.execute("CREATE TABLE IF NOT EXISTS a_new_table (number integer)")
    with psycopg.connect(postgres.url("app_ops")) as ops:
        ops.execute("INSERT INTO a_new_table VALUES (7)")
        assert ops.execute("SELECT count(*) FROM a_new_table WHERE number = 7").fetchone() == (1,)
        ops.rollback()
    with psycopg.connect(postgres.url("app_rw")) as tenant, pytest.raises(psycopg.errors.InsufficientPrivilege):
        tenant.execute("SELECT number FROM a_new_table")


@pytest.mark.parametrize("role", ["app_rw", "app_ops"])
def test_only_the_owner_makes_tables(postgres: EmbeddedPostgres, role: str) -> None:
    with psycopg.connect(postgres.url(role)) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("CREATE TABLE not_mine (number integer)")


def test_what_was_committed_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    first = EmbeddedPostgres(tmp_path)
    with running(first, tmp_path / "log") as process:
        with psycopg.connect(first.url("app_owner")) as owner:
            owner.execute("CREATE TABLE kept (number integer)")
            owner.execute("INSERT INTO kept VALUES (42)")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / "postgres" / "cluster" / "postmaster.pid").exists()
    second = EmbeddedPostgres(tmp_path)
    with running(second, tmp_path / "log"), psycopg.connect(second.url("app_owner")) as owner:
        assert owner.execute("SELECT number FROM kept").fetchone() == (42,)


def test_a_pid_file_that_names_a_stranger_does_not_block_the_start(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path, durable=False)
    server.prepare()
    (tmp_path / "postgres" / "cluster" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    with running(server, tmp_path / "log"):
        assert server.is_ready()


def test_a_second_server_on_the_same_cluster_is_refused(postgres: EmbeddedPostgres) -> None:
    with pytest.raises(EmbeddedError, match="already runs"):
        postgres.prepare()


def test_a_first_start_that_was_killed_half_way_is_begun_again(tmp_path: Path) -> None:
    half_made = tmp_path / "postgres" / "cluster.draft"
    half_made.mkdir(parents=True)
    (half_made / "PG_VERSION").write_text("18")
    server = EmbeddedPostgres(tmp_path, durable=False)
    with running(server, tmp_path / "log"):
        assert server.is_ready()
    assert not half_made.exists()


def test_postgresql_ends_by_its_stop_signal_whoever_is_still_connected(tmp_path: Path) -> None:
    """By SIGTERM it would wait for the pools, which never leave."""
    server = EmbeddedPostgres(tmp_path, durable=False)
    with running(server, tmp_path / "log") as process, psycopg.connect(server.url("app_ops")) as pooled:
        process.send_signal(server.stop_signal)
        assert process.wait(timeout=10) == 0
        with pytest.raises(psycopg.OperationalError):
            pooled.execute("SELECT 1")


def test_valkey_keeps_its_entries_over_a_restart(tmp_path: Path) -> None:
    first = EmbeddedValkey(tmp_path)
    with running(first, tmp_path / "log"):
        _say(first, "SET kept 42")
    second = EmbeddedValkey(tmp_path)
    with running(second, tmp_path / "log"):
        assert _say(second, "GET kept") == [b"$2", b"42"]
    assert second.url == first.url


def test_valkey_answers_nobody_without_the_password(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path)
    with running(server, tmp_path / "log"), socket.create_connection(_address(server), timeout=5) as connection:
        connection.sendall(b"GET kept\r\n")
        assert connection.recv(64).startswith(b"-NOAUTH")


def test_secrets_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "secret"
    assert kept_secret(path) == kept_secret(path) != ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_port_is_kept_while_it_is_free_and_changed_when_taken(tmp_path: Path) -> None:
    path = tmp_path / "port"
    port = kept_port(path)
    assert kept_port(path) == port
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free(port)
        assert kept_port(path) != port


def _address(server: EmbeddedValkey) -> tuple[str, int]:
    host, _, port = server.url.rsplit("@", 1)[1].removesuffix("/0").partition(":")
    return host, int(port)


def _say(server: EmbeddedValkey, command: str) -> list[bytes]:
    password = server.url.split(":")[2].split("@")[0]
    with socket.create_connection(_address(server), timeout=5) as connection:
        connection.sendall(f"AUTH {password}\r\n{command}\r\n".encode())
        with connection.makefile("rb") as file:
            assert file.readline().strip() == b"+OK"
            first = file.readline().strip()
            return [first, file.readline().strip()] if first.startswith(b"$") else [first]
