"""When the interpreter looks for dead cycles: between two spells of work, and not in a step.

A full look visits every object that lives, so that it lasts as long as the queue is long; ``benchmarks.scheduler``
prints the longest step while 100,000 requests come. The engine makes no cycles: what does (errors, threads) is little.
"""

from __future__ import annotations

import gc

IDLE_INTERVAL_US = 60_000_000
BUSY_INTERVAL_US = 600_000_000  # one that is never idle still has its memory back
_YOUNG, _MIDDLE, _NEVER = 10_000, 10, 1_000_000_000  # objects, looks at the young, looks at the middle-aged


def keep_out_of_steps() -> None:
    """What lives now lives as long as the process and is not looked through again; from here on the interpreter looks
    at young objects only, by itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


class Sweeper:
    """Full looks. Always: a minute apart while idle, ten while never idle."""

    def __init__(self, now_us: int) -> None:
        self._swept_at_us = now_us

    def sweep(self, now_us: int, *, is_idle: bool) -> bool:
        """Look through all of it, if that is due; True if it was."""
        is_due = now_us - self._swept_at_us >= (IDLE_INTERVAL_US if is_idle else BUSY_INTERVAL_US)
        if is_due:
            gc.collect()
            self._swept_at_us = now_us
        return is_due
