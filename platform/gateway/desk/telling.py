"""How far the newest policy has come: saved, or told to gateways and workers too. Asks PostgreSQL and Redis; tells
nobody itself.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.utils import timezone
from redis.exceptions import RedisError

from tenants.models import PolicyVersion
from wire.redis_bus import connect
from wire.redis_keys import Keys

PATIENCE_S = 1.0  # a page waits no longer for Redis


@dataclass(frozen=True, slots=True)
class Telling:
    """``version`` was saved at ``saved_at``; 0 and None before the first. ``held`` is the one that gateways and workers
    follow: 0 where Redis holds none, None where it does not answer.
    """

    version: int
    saved_at: datetime | None
    held: int | None

    @property
    def is_told(self) -> bool:
        return self.held == self.version

    @property
    def age_s(self) -> int:
        """Whole seconds since it was saved."""
        return 0 if self.saved_at is None else int((timezone.now() - self.saved_at).total_seconds())


def telling() -> Telling:
    """As it is now. Redis is asked first: what it holds was saved before, or is not of this database."""
    held = _held()
    newest = PolicyVersion.objects.defer("document").first()
    return Telling(newest.version, newest.created_at, held) if newest else Telling(0, None, held)


def _held() -> int | None:
    try:
        with closing(connect(settings.REDIS_URL, timeout_s=PATIENCE_S)) as client:
            return int(client.get(Keys(settings.RUBATO_REDIS_PREFIX).policy_version) or 0)
    except RedisError:
        return None
