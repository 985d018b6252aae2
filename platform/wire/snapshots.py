"""What a worker tells of itself four times a second: for the door, for /metrics and for the operator's board.

Counters are since the worker's epoch began and never fall within it; gauges are now. All lists are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_engine.policy import PriorityClass

LOGPROBS, GRAMMAR = "logprobs", "grammar"  # features of a worker
HISTOGRAM_BOUNDS_MS = (
    5,
    10,
    25,
    50,
    100,
    200,
    300,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    30_000,
    60_000,
    300_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations by bucket. ``counts[i]`` are those <= HISTOGRAM_BOUNDS_MS[i] and above the bound before; the last is
    the rest.
    """

    counts: tuple[int, ...]
    sum_us: int


EMPTY_HISTOGRAM = Histogram(counts=(0,) * (len(HISTOGRAM_BOUNDS_MS) + 1), sum_us=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSnapshot:
    """One class on one worker. Counters are since its epoch began; gauges are now."""

    priority_class: PriorityClass
    num_waiting: int
    num_running: int
    num_suspended: int
    waiting_gpu_us: int
    estimated_start_q50_us: int
    estimated_start_q90_us: int
    closed: bool
    retry_after_us: int | None
    prompt_tokens: int
    output_tokens: int
    queue_wait: Histogram
    ttft: Histogram
    preemptions: tuple[tuple[str, str, int], ...]  # (lever, resource, count) of requests of this class
    shed: tuple[tuple[str, int], ...]  # (reason, count): rejected at the door or ended before the first token
    tpot: Histogram = EMPTY_HISTOGRAM  # of a finished choice: first token to last, per token after the first
    duration: Histogram = EMPTY_HISTOGRAM  # from arrival to the end, of those that were not shed
    ttft_target_us: int | None = None  # of the policy in force
    tpot_target_us: int | None = None
    floor_debt_us: int = 0
    slot_cap: int = 0
    reserve_blocks: int = 0
    num_promises_kept: int = 0  # came back at their Retry-After and started
    num_promises_broken: int = 0
    fairness_gap_us: int = 0  # service over weight, most minus least, of tenants with somebody waiting; now
    fairness_bound_us: int = 0  # what it cannot pass (docs/scheduling.md)
    recomputed_tokens: int = 0
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRow:
    """One request on the device, for the live page."""

    response_id: str
    tenant_id: str
    priority_class: PriorityClass
    state: str
    num_blocks: int
    num_computed_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNews:
    """What the policy is doing now (rung, switching), and what it did since the epoch began (counts never fall)."""

    rung: str = ""
    batch_paused_us: int = 0
    num_batch_pauses: int = 0
    switching_per_mille: int = 0  # thrash ratio: of the last ten seconds' busy time, copies and recomputation
    num_governor_cuts: int = 0
    num_bypasses: int = 0
    num_relegations: int = 0
    num_kept_out: int = 0
    num_rests: int = 0
    sheds: tuple[tuple[str, str, str, int], ...] = ()  # (class, rung, reason, count)
    preemptions: tuple[tuple[str, str, str, str, int], ...] = ()  # (class, by class or "", resource, lever, count)


MOST_TENANTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """One tenant on one worker. ``tenant_id`` is empty for all that came after the first MOST_TENANTS together.

    ``gpu_us`` by rank of the class, since the epoch began. ``weight``: its largest; 0 while nothing of it lives here.
    """

    tenant_id: str
    gpu_us: tuple[int, ...]
    weight: int
    num_live: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """Published by each worker every 150 ms from its I/O thread, and whenever it has something new to say."""

    worker_id: str
    epoch: int
    model: str
    ready: bool
    draining: bool
    max_model_len: int
    last_step_age_us: int
    step: int
    num_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_slots: int
    num_free_slots: int
    policy_version: int
    prompt_tokens_total: int
    output_tokens_total: int
    busy_us_total: int
    classes: tuple[ClassSnapshot, ...]
    board: tuple[BoardRow, ...] = ()
    features: tuple[str, ...] = ()  # what it can do that not every worker can: LOGPROBS, GRAMMAR
    num_cache_tokens: int = 0  # tokens that the device's KV cache holds
    version: str = ""  # of the worker's software
    epoch_age_us: int = 0  # its counters began at 0 so long ago
    scheduling_us_total: int = 0  # time spent in planning and applying steps
    num_empty_steps: int = 0
    num_checkpoint_blocks: int = 0  # of the host pool: copies, made ahead, of what is still on the device
    checkpoint_lag_blocks: int = 0  # full blocks of those likely to give way that have no such copy
    num_blocks_saved_ahead_total: int = 0
    bytes_per_block: int = 0  # of a KV block, all layers
    policy: PolicyNews = PolicyNews()
    tenants: tuple[TenantSnapshot, ...] = ()  # at most MOST_TENANTS and one; refreshed once a second
