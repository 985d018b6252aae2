"""The backend by the name that Django looks for."""

from __future__ import annotations

from collections.abc import Callable

from django.db.backends.postgresql.base import DatabaseWrapper as PostgreSQL
from psycopg import Connection
from psycopg_pool import ConnectionPool

from gateway.postgresql import POOL_OPTIONS


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
