"""Reservations that nobody can end any more: found and released, so that nobody is charged for a crash.

Knows who owns a response; refuses to guess what an engine may have counted. Looks only while the usage stream is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from billing import selectors
from billing.models import UsageRequest
from billing.pricing import Terminal
from gateway.gate import Record
from wire.messages import Released

MIN_AGE = timedelta(seconds=30)
GRACE_S = 60.0  # a live worker cancels and settles a lost gateway's responses within 15 s
MAX_PER_SWEEP = 500


class ResponseGate(Protocol):
    """The part of ``gateway.gate.Gate`` that a sweep needs."""

    def records(self, response_ids: Sequence[str]) -> Mapping[str, Record]: ...

    def live_gateways(self, gateway_ids: Sequence[str]) -> frozenset[str]: ...

    def end(self, released: Released) -> None: ...


class OrphanSweep:
    """Always: an operation is released only after it stood without a living owner for the whole grace, look after
    look.
    """

    def __init__(
        self,
        gate: ResponseGate,
        *,
        clock_s: Callable[[], float],
        now: Callable[[], datetime],
        grace_s: float = GRACE_S,
    ) -> None:
        self._gate = gate
        self._clock_s = clock_s
        self._now = now
        self._grace_s = grace_s
        self._unowned_since_s: dict[UUID, float] = {}

    def run(self) -> int:
        """One look; returns how many operations were released."""
        now_s = self._clock_s()
        unowned = self._unowned()
        self._unowned_since_s = {operation.id: self._unowned_since_s.get(operation.id, now_s) for operation in unowned}
        lost = [one for one in unowned if now_s - self._unowned_since_s[one.id] >= self._grace_s]
        for operation in lost:
            self._release(operation)
        return len(lost)

    def _unowned(self) -> list[UsageRequest]:
        operations = selectors.open_operations(reserved_before=self._now() - MIN_AGE, limit=MAX_PER_SWEEP)
        if not operations:
            return []
        records = self._gate.records([str(operation.id) for operation in operations])
        alive = self._gate.live_gateways(sorted({record.gateway_id for record in records.values()}))
        return [operation for operation in operations if _is_unowned(records.get(str(operation.id)), alive)]

    def _release(self, operation: UsageRequest) -> None:
        """Through the stream, also where Redis has forgotten the record: so a gate that is being rebuilt sees it."""
        released = Released(
            response_id=str(operation.id), tenant_id=str(operation.tenant_id), reason=Terminal.EXPIRED.value
        )
        self._gate.end(released)


def _is_unowned(record: Record | None, alive: frozenset[str]) -> bool:
    """A record that is done has its end in the stream already."""
    return record is None or (record.state == "open" and record.gateway_id not in alive)
