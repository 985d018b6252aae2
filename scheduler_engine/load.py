"""How busy the engine is, as values: for the door, for /metrics and for the live board."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """One class now, and its counters since start (monotonic)."""

    priority_class: PriorityClass
    num_waiting: int
    num_running: int
    num_suspended: int
    waiting_gpu_us: int
    estimated_start_q50_us: int
    estimated_start_q90_us: int
    closed: bool
    retry_after_us: int | None
    floor_debt_us: int = 0  # device time its floor owes it
    reserve_blocks: int = 0  # kept free below its mark for the classes above
    slot_cap: int = 0  # how many it may run at once, by the governor
    num_promises_kept: int = 0  # came back when told to and started
    num_promises_broken: int = 0  # came back when told to and were refused once more


@dataclass(frozen=True, slots=True)
class BoardRow:
    """One request on the device or suspended. ``state``: prefill, decode, held, on_host, dropped."""

    request_id: RequestId
    tenant_id: str
    priority_class: PriorityClass
    state: str
    num_blocks: int
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ShedCount:
    """Requests refused or ended before their start. ``rung``: how far up the shedding ladder the engine stood."""

    priority_class: PriorityClass
    rung: str
    reason: str  # RejectReason value
    count: int


@dataclass(frozen=True, slots=True)
class PreemptionCount:
    """Requests that gave way. ``by_class`` None: to the growth of their own class, or their row had failed."""

    priority_class: PriorityClass
    by_class: PriorityClass | None
    resource: str
    lever: str
    count: int


@dataclass(frozen=True, slots=True)
class PolicyLoad:
    """What the policy is doing (gauges), and what it did since the start (counts, which never fall)."""

    rung: str = "calm"
    batch_paused_us: int = 0
    num_batch_pauses: int = 0
    switching_per_mille: int = 0  # of the last ten seconds' busy time: copies and recomputation
    num_governor_cuts: int = 0
    num_bypasses: int = 0
    num_relegations: int = 0
    num_kept_out: int = 0  # times a head left the last room of its class to tenants with less
    num_rests: int = 0  # times a head stayed out of memory just taken from its class
    sheds: tuple[ShedCount, ...] = ()
    preemptions: tuple[PreemptionCount, ...] = ()


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant since the start. ``weight``: its largest; 0 while nothing of it lives here."""

    tenant_id: str
    gpu_us: tuple[int, ...]  # by rank of the class
    weight: int
    num_live: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The whole engine at one step boundary. ``busy_us`` and ``charged_us`` are equal, always (rule 7)."""

    step: int
    num_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_slots: int
    num_free_slots: int
    busy_us: int
    charged_us: int
    classes: tuple[ClassLoad, ...]
    board: tuple[BoardRow, ...]
    policy: PolicyLoad = PolicyLoad()
    num_checkpoint_blocks: int = 0  # host blocks that hold a copy of what is on the device too
    checkpoint_lag_blocks: int = 0  # full blocks of the likeliest victims without such a copy
    num_blocks_saved_ahead: int = 0  # since the start
