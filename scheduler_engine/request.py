"""A request as the engine receives it: token counts and promises, never text.

Knows what was asked; refuses to know how it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from scheduler_engine.policy import PriorityClass

RequestId = NewType("RequestId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. Arrival is the ``now_us`` of ``Scheduler.submit`` and never changes.

    Durations are relative to arrival, in microseconds, or None. ``sampling`` is opaque to the engine and is handed to
    the executor. ``delivered_token_ids`` are outputs of an earlier attempt: computed history, not billed again.
    ``prefix_keys[i]`` names the prompt up to the end of its block i, full blocks only, to those who may share it; none:
    nothing is shared. Blocks that its output fills are named later, by ``Scheduler.name_blocks``.
    """

    request_id: RequestId
    tenant_id: str
    priority_class: PriorityClass
    prompt_token_ids: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    deadline_us: int | None = None  # to the first token; soft, orders inside the tenant
    hard_deadline_us: int | None = None  # to the first token; shed when it cannot be kept
    completion_deadline_us: int | None = None  # to the last token; refuses before the start, only orders after it
    max_queue_wait_us: int | None = None
    reproducible: bool = False  # forbids recompute as a lever
    value_micros: int = 1
    prefix_keys: Sequence[bytes] = ()
    delivered_token_ids: tuple[int, ...] = ()
    response_has_started: bool = False  # in an earlier attempt, by a token of this choice or of another
    is_return: bool = False  # refused before with a time to come back, and back at that time or later
    sampling: object = None

    @property
    def has_started(self) -> bool:
        """In an earlier attempt: nobody refuses or sheds it any more."""
        return self.response_has_started or bool(self.delivered_token_ids)
