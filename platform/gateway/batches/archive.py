"""What the routes of files and batches stand on: the disk, a few database threads, and limits. Refuses to know HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from django.conf import settings

from gateway.batches.storage import Storage
from gateway.database_threads import DatabaseThreads
from gateway.errors import PERHAPS_DONE, InvalidRequest, Reason, invalid
from gateway.postgresql import AWAY

Result = TypeVar("Result")

MAX_UPLOADS = 4  # of one tenant at once, in this process
LONGEST_S = 10.0  # that somebody waits for a thread and the database


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Always: what one tenant may keep is bounded."""

    storage: Storage
    threads: DatabaseThreads = field(default_factory=partial(DatabaseThreads, LONGEST_S))
    file_limit_bytes: int
    tenant_limit_bytes: int
    open_batches: int = 100  # of a tenant
    calls_per_minute: int = 600  # of a tenant
    uploads: dict[str, int] = field(default_factory=dict)  # under way, by tenant

    @classmethod
    def from_settings(cls) -> Archive:
        return cls(
            storage=Storage(Path(settings.RUBATO_FILES_DIR)),
            file_limit_bytes=settings.RUBATO_FILE_LIMIT_BYTES,
            tenant_limit_bytes=settings.RUBATO_TENANT_FILES_BYTES,
            open_batches=settings.RUBATO_TENANT_OPEN_BATCHES,
            calls_per_minute=settings.RUBATO_ARCHIVE_CALLS_PER_MINUTE,
        )

    @contextmanager
    def upload(self, tenant_id: str) -> Iterator[None]:
        """One of the tenant's. Raises InvalidRequest for one too many."""
        if self.uploads.get(tenant_id, 0) >= MAX_UPLOADS:
            raise invalid(Reason.CONCURRENCY, f"At most {MAX_UPLOADS} uploads at once.")
        self.uploads[tenant_id] = self.uploads.get(tenant_id, 0) + 1
        try:
            yield
        finally:
            self.uploads[tenant_id] -= 1
            if not self.uploads[tenant_id]:
                del self.uploads[tenant_id]

    async def ask(self, work: Callable[[], Result], *, may_repeat: bool = True) -> Result:
        """Database work in a thread. Raises InvalidRequest (503) while the database does not answer; where ``work``
        once more would make another thing, its words do not invite to that.
        """
        try:
            return await self.threads.run(work)
        except AWAY as error:
            if not may_repeat:
                raise InvalidRequest(PERHAPS_DONE) from error
            raise invalid(Reason.UNAVAILABLE, "Files and batches cannot be looked up now.") from error
