"""The backend by the name that Django looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.backends.postgresql.base import DatabaseWrapper as PostgreSQL
from psycopg import Connection
from psycopg_pool import ConnectionPool

from gateway import postgresql
from gateway.postgresql import POOL_OPTIONS, Heard


class DatabaseWrapper(PostgreSQL):
    """``OPTIONS["pool"]`` holds what differs from POOL_OPTIONS: at least ``max_size``."""

    _connection_pools: dict[str, ConnectionPool]
    _configure_connection: Callable[[Connection], None]

    @property
    def pool(self) -> ConnectionPool | None:
        """Of this alias, one for the process; None where none is asked for."""
        options = self.settings_dict["OPTIONS"].get("pool")
        if not options:
            return None
        if self.alias not in self._connection_pools:
            pool = ConnectionPool(
                kwargs={**self.get_connection_params(), "autocommit": True},  # Django sets what it wants later
                configure=self._configure_connection,
                **POOL_OPTIONS | options,
            )
            self._connection_pools.setdefault(self.alias, pool)  # several threads may come first: one wins
        return self._connection_pools[self.alias]

    def get_new_connection(self, conn_params: dict[str, Any]) -> Connection:
        """Whoever takes it from the pool waits longer for an answer than the pool does."""
        connection: Connection = super().get_new_connection(conn_params)
        if isinstance(connection, Heard):
            connection.silence_s = postgresql.SILENCE_S
        return connection

    def _close(self) -> None:
        if isinstance(self.connection, Heard):
            self.connection.silence_s = postgresql.TRIAL_S
        super()._close()  # type: ignore[misc]  # of Django, not in its types
