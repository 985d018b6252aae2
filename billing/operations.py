"""The state of each operation, written beside the ledger line that has just been inserted. Refuses to decide anything.

Called once per (operation, reserve) and once per (operation, end): the ledger's unique keys see to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime

from billing.lines import Line
from billing.messages import Counters, LedgerMessage, Release, Reservation, Settlement
from billing.models import RELEASED, UsageRequest
from billing.pricing import Terminal

_RESERVED_FIELDS = [
    *("project_id", "key_id", "priority_class", "model", "source", "window_id", "policy_version", "price_version"),
    *("reserved_micros", "reserved_tokens", "reserved_at", "requested_class"),
]
_END_FIELDS = [
    *["state", "attempt", "reason", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros", "ended_at"],
    *(field.name for field in fields(Counters)),
]


@dataclass(frozen=True, slots=True)
class Written:
    """A message whose line is now in the ledger, and the moment that line carries."""

    message: LedgerMessage
    line: Line
    written_at: datetime


def record(written: Sequence[Written]) -> None:
    """Brings operations in line with what was just written, whichever of reserve and end came first."""
    ordered = sorted(written, key=lambda one: one.message.operation_id)  # one order everywhere: no deadlocks
    reserved = [_reserved(one.message, one.written_at) for one in ordered if isinstance(one.message, Reservation)]
    ended = [_ended(one) for one in ordered if not isinstance(one.message, Reservation)]
    for rows, names in ((reserved, _RESERVED_FIELDS), (ended, _END_FIELDS)):
        UsageRequest.objects.bulk_create(rows, update_conflicts=True, unique_fields=["id"], update_fields=names)


def _reserved(message: Reservation, reserved_at: datetime) -> UsageRequest:
    return UsageRequest(
        id=message.operation_id,
        tenant_id=message.tenant_id,
        project_id=message.project_id,
        key_id=message.key_id,
        priority_class=message.priority_class,
        model=message.model,
        source=message.source,
        window_id=message.window_id,
        policy_version=message.policy_version,
        price_version=message.price_version,
        reserved_micros=message.money_micros,
        reserved_tokens=message.reserved_tokens,
        reserved_at=reserved_at,
        requested_class=message.requested_class,
    )


def _ended(written: Written) -> UsageRequest:
    message, line = written.message, written.line
    row = UsageRequest(
        id=message.operation_id,
        tenant_id=message.tenant_id,
        attempt=line.attempt,
        reason=line.reason,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        output_tokens=line.output_tokens,
        cost_micros=line.amount_micros,
        ended_at=written.written_at,
    )
    if isinstance(message, Settlement):
        row.state = message.terminal.value
        row.project_id, row.key_id = message.project_id, message.key_id
        row.priority_class, row.model = message.priority_class, message.model
        row.requested_class = message.requested_class
        row.policy_version, row.price_version = message.policy_version, message.price_version
        for name, value in asdict(message.counters).items():
            setattr(row, name, value)
    elif isinstance(message, Release):
        row.state = Terminal.EXPIRED.value if message.reason == Terminal.EXPIRED else RELEASED
    return row
