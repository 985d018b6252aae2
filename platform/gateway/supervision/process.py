"""One supervised process: what it is, when it counts as ready, when it is started again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

STEADY_S = 30.0  # a life of this length forgives the deaths before it
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0
MAX_SHORT_LIVES = 5
HOPELESS_STATUSES = frozenset({2, 78})  # wrong arguments (argparse) and wrong configuration: another start cannot help


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to run one process. ``before_start`` runs before every start, also after a death.

    ``is_ready`` must answer within a second or so, and is asked once the process has lived for ``asked_after_s``: until
    then the answer may be that of the life before. Without it a process is ready once it has lived for ``settled_s``.
    """

    name: str
    command: Callable[[], list[str]]
    environment: Mapping[str, str]
    before_start: Callable[[], None] | None = None
    is_ready: Callable[[], bool] | None = None
    asked_after_s: float = 0.0
    settled_s: float = 1.0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 15.0


@dataclass(slots=True)
class Restarts:
    """Back-off of one process. Always: a steady life sets it back; ``MAX_SHORT_LIVES`` short ones in a row end it."""

    num_short_lives: int = field(default=0)

    def delay_s(self, lived_s: float, status: int) -> float | None:
        """Seconds until the next start, or None where another start is no use."""
        if lived_s >= STEADY_S:
            self.num_short_lives = 0
        self.num_short_lives += 1
        if status in HOPELESS_STATUSES or self.num_short_lives >= MAX_SHORT_LIVES:
            return None
        return min(FIRST_DELAY_S * float(1 << (self.num_short_lives - 1)), LONGEST_DELAY_S)


def status_in_words(status: int) -> str:
    """``status`` as subprocess gives it: negative is the signal that killed the process."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
