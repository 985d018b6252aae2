"""What the books are told, as plain values. The settler translates the Bus's messages into these; billing knows no
wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from billing.pricing import Terminal, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Taken at admission, before any work: the most that the operation may cost."""

    operation_id: UUID
    tenant_id: UUID
    project_id: UUID
    key_id: UUID | None  # None: a member asked in the console
    priority_class: str
    model: str
    source: str
    money_micros: int
    reserved_tokens: int
    window_id: str
    policy_version: int
    price_version: int
    requested_class: str = ""  # blank: as asked for; else a lower class served it


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the operation took of the device; recorded, never charged."""

    queue_us: int = 0
    ttft_us: int | None = None
    total_us: int = 0
    gpu_us: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The worker's count at the end of an operation: the only count there is."""

    operation_id: UUID
    attempt: int
    tenant_id: UUID
    project_id: UUID
    key_id: UUID | None
    priority_class: str
    model: str
    counts: TokenCounts
    terminal: Terminal
    policy_version: int
    price_version: int
    counters: Counters = Counters()
    requested_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The operation reached no engine, or died with it: ends at zero."""

    operation_id: UUID
    tenant_id: UUID
    reason: str


End = Settlement | Release
LedgerMessage = Reservation | Settlement | Release
