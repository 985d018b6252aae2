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
