"""A step while it is being decided, and the events that wait for the next ``apply_step``.

Knows what has been granted so far; refuses to grant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_engine.events import Accepted, Finished, Preempted, Rejected
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest
from scheduler_engine.plan import BlockCopy
from scheduler_engine.policy import RANKS
from scheduler_engine.request import RequestId


class Chunk(NamedTuple):
    """Prefill granted to one request in this step: positions ``[computed, computed + count)``."""

    live: LiveRequest
    num_tokens: int


class CopyCharge(NamedTuple):
    """Who pays for copies of this step, and their predicted cost."""

    account: Account
    cost_ns: int


@dataclass(slots=True)
class Draft:
    """One step being planned. Always: everything in it has already been taken from the pools."""

    step: int
    now_us: int
    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copy_charges: list[CopyCharge] = field(default_factory=list)
    host_blocks_after: list[int] = field(default_factory=list)  # read by this step's swap_in, free once it is done
    idle: dict[RequestId, LiveRequest] = field(default_factory=dict)  # decodes that get no row in this step
    holding: list[bool] = field(default_factory=lambda: [False for _ in RANKS])  # classes with decodes held back
    first_token_by: LiveRequest | None = None  # most urgent prefill of a class that promises a first token
    first_token_hold: bool = False  # lower classes were held for it
    lowest_swapped_rank: int = -1  # least urgent class that was swapped out in this step


@dataclass(slots=True)
class Outbox:
    """Events gathered since the last ``apply_step``, in order of happening."""

    accepted: list[Accepted] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    resumed: list[RequestId] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.accepted or self.rejected or self.preempted or self.resumed or self.finished)
