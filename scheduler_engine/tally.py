"""What the policy did since the start, counted: for /metrics, the boards and the simulator. None ever falls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_engine.events import Lever, Resource
from scheduler_engine.policy import PriorityClass

PreemptionKey = tuple[PriorityClass, PriorityClass | None, Resource, Lever]


@dataclass(slots=True)
class Tally:
    """Always: each preemption counts once, under the class that gave way and the class it gave way to (None: its own
    growth or a failed row).
    """

    preemptions: Counter[PreemptionKey] = field(default_factory=Counter)
    num_bypasses: int = 0
    num_relegations: int = 0
    num_kept_out: int = 0  # heads that would have taken the last slots or blocks from tenants below their share
    num_rests: int = 0  # heads that would have come back into memory just taken from their class
