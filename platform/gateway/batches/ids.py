"""Names of files, batches and lines: UUIDs in the database, prefixed hex digits for the client."""

from __future__ import annotations

import os
import re
import time
from typing import Final
from uuid import UUID, uuid5

from gateway.admission import new_response_id

FILE: Final = "file-"
BATCH: Final = "batch_"
LINE: Final = "batch_req_"
_HEX = re.compile(r"[0-9a-f]{32}\Z")


def new_id() -> UUID:
    """UUIDv7: newer ids are greater, and none can be guessed."""
    return UUID(new_response_id(time.time_ns() // 1_000_000, os.urandom(10)))


def shown(prefix: str, object_id: UUID) -> str:
    return prefix + object_id.hex


def parse(prefix: str, text: str) -> UUID | None:
    """None for what is no id of this kind: such an object does not exist."""
    digits = text.removeprefix(prefix)
    return UUID(hex=digits) if text.startswith(prefix) and _HEX.match(digits) else None


def response_id(batch_id: UUID, number: int, num_tries: int) -> str:
    """The operation that answers a line at its ``num_tries``-th try: the same one whoever drives the batch."""
    return str(uuid5(batch_id, f"{number}/{num_tries}"))
