"""PostgreSQL and Valkey out of pip wheels, for machines where nobody gives a DATABASE_URL or a REDIS_URL.

Knows how to create, configure and address both servers; refuses to know who supervises them.
"""

from gateway.embedded.postgres import EmbeddedPostgres
from gateway.embedded.service import EmbeddedError, EmbeddedService, running
from gateway.embedded.valkey import EmbeddedValkey

__all__ = ["EmbeddedError", "EmbeddedPostgres", "EmbeddedService", "EmbeddedValkey", "running"]
