"""What an operator is told, and how long to wait before the Bus is tried again."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from datetime import UTC, datetime

from wire.bus import BusError

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0


def say(line: str) -> None:
    """One line for the operator; one JSON object under LOG_FORMAT=json, as the platform's own lines are."""
    if os.environ.get("LOG_FORMAT") == "json":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"time": now, "level": "INFO", "logger": "gpu_worker", "message": line})
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def stacks() -> str:
    """Where every thread of this process is just now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    )


class Outage:
    """Doubling pauses. Always: one line when an outage begins and one when it ends, however often it was tried."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._pause_s = 0.0

    def pause_s(self, error: BusError) -> float:
        if not self._pause_s:
            say(f"{self._doing}: {error}; trying again")
        self._pause_s = min(LAST_RETRY_S, 2 * self._pause_s or FIRST_RETRY_S)
        return self._pause_s

    def is_over(self) -> None:
        if self._pause_s:
            say(f"{self._doing}: the Bus is back")
        self._pause_s = 0.0
