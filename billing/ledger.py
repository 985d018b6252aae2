"""The books themselves: messages in, ledger lines out, each exactly once. Refuses to know where messages come from.

At-least-once delivery plus unique keys: what has been written before is recognised and compared, never written again.
What stands in the end does not depend on the order in which a reservation and its end arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from typing import assert_never
from uuid import UUID

from django.db import DataError, IntegrityError, connection, transaction

from billing import alerts, operations, rollups, selectors
from billing.alerts import Finding
from billing.lines import Line, PriceList, Slot, is_priced, line_of, slot
from billing.messages import LedgerMessage, Release, Reservation, Settlement
from billing.models import LedgerEntry
from billing.operations import Written

ACTOR = "settler"
MAX_BATCH = 500

_COLUMNS = ", ".join(field.name for field in fields(Line))
_INSERT = f"""
INSERT INTO billing_ledgerentry ({_COLUMNS}, entry_key, actor, created_at)
SELECT {_COLUMNS}, kind, '{ACTOR}', now()
FROM unnest(%s::uuid[], %s::text[], %s::uuid[], %s::uuid[], %s::uuid[], %s::text[], %s::text[], %s::bigint[],
            %s::bigint[], %s::int[], %s::bigint[], %s::bigint[], %s::bigint[], %s::text[], %s::text[])
     AS line({_COLUMNS})
ON CONFLICT DO NOTHING
RETURNING operation_id, kind, created_at
"""


@dataclass(frozen=True, slots=True)
class Applied:
    """What messages did to the books. Always: every message is counted once, as written, repeated or refused."""

    num_reserved: int = 0
    num_settled: int = 0
    num_released: int = 0
    num_repeated: int = 0
    num_refused: int = 0
    num_alerts: int = 0

    def __add__(self, other: Applied) -> Applied:
        return Applied(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def apply_surely(messages: Sequence[LedgerMessage]) -> Applied:
    """Like ``apply``, but a message that the database cannot hold becomes an alert and never stops the others."""
    try:
        return apply(messages)
    except (DataError, IntegrityError) as error:
        if len(messages) > 1:
            return sum((apply_surely([message]) for message in messages), Applied())
        return Applied(num_refused=1, num_alerts=alerts.record([alerts.unwritable(messages[0], error)]))


def apply(messages: Sequence[LedgerMessage]) -> Applied:
    """Writes at most MAX_BATCH messages in one transaction: all of them, or none and an exception."""
    if len(messages) > MAX_BATCH:
        raise ValueError(f"a batch has at most {MAX_BATCH} messages, not {len(messages)}")
    with transaction.atomic():
        priced = _priced(messages)
        first: dict[Slot, tuple[LedgerMessage, Line]] = {}
        for message, line, _ in priced:
            first.setdefault(line.slot, (message, line))
        moments = _insert([line for _, line in first.values()])
        written = [Written(*first[place], moment) for place, moment in moments.items()]
        operations.record(written)
        rollups.add([_counted(one) for one in written if one.line.attempt is not None])
        num_alerts = alerts.record(_findings(priced, written))
    return _tally(written, num_repeated=len(messages) - len(written), num_alerts=num_alerts)


def _priced(messages: Sequence[LedgerMessage]) -> list[tuple[LedgerMessage, Line, PriceList]]:
    """Each message with its line, charged at the price version of its reservation where that is known."""
    reserved = _reserved_versions(messages)

    def version(message: LedgerMessage) -> int:
        match message:
            case Reservation():
                return message.price_version
            case Settlement():
                return reserved.get(message.operation_id, message.price_version)
            case Release():
                return 0
            case _:
                assert_never(message)

    lists = selectors.price_lists(version(message) for message in messages)
    return [(message, line_of(message, lists[version(message)]), lists[version(message)]) for message in messages]


def _reserved_versions(messages: Sequence[LedgerMessage]) -> dict[UUID, int]:
    """Price versions of the operations that end here: from the ledger, else from this very batch."""
    ended = [message.operation_id for message in messages if isinstance(message, Settlement)]
    versions = {
        message.operation_id: message.price_version
        for message in reversed(messages)
        if isinstance(message, Reservation)
    }
    entries = LedgerEntry.objects.filter(kind="reserve", operation_id__in=ended)
    versions.update(entries.values_list("operation_id", "price_version"))
    return versions


def _insert(lines: Sequence[Line]) -> dict[Slot, datetime]:
    """Inserts what is not there yet; returns the moments of the lines that are new."""
    if not lines:
        return {}
    ordered = sorted(
        lines, key=lambda line: (line.operation_id, line.kind != "reserve")
    )  # one order everywhere: no deadlocks
    with connection.cursor() as cursor:
        cursor.execute(_INSERT, [list(column) for column in zip(*map(astuple, ordered), strict=True)])
        return {slot(operation_id, kind): moment for operation_id, kind, moment in cursor.fetchall()}


def _counted(written: Written) -> rollups.CountedEnd:
    line = written.line
    return rollups.CountedEnd(
        tenant_id=line.tenant_id,
        project_id=line.project_id,
        key_id=line.key_id,
        priority_class=line.priority_class,
        model=line.model,
        is_charged=line.kind == "settle",
        created_at=written.written_at,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        output_tokens=line.output_tokens,
        cost_micros=line.amount_micros,
        num_downgraded=int(line.requested_class != ""),
    )


def _findings(priced: Sequence[tuple[LedgerMessage, Line, PriceList]], written: Sequence[Written]) -> Iterator[Finding]:
    """Redeliveries that say something else, ends that do not fit their reservation, tokens without a price."""
    standing = _standing({message.operation_id for message, _, _ in priced})
    for message, line, prices in priced:
        stands = standing[line.slot]
        if line != stands:
            if not _says_nothing(line) and not _is_rework(line, stands):
                yield alerts.differs("amounts_differ" if line.kind == "reserve" else "second_end", message, stands)
        elif not is_priced(message, prices):
            yield alerts.unpriced(message)
    for operation_id, message in {one.line.operation_id: one.message for one in written}.items():
        reserve, end = standing.get(slot(operation_id, "reserve")), standing.get(slot(operation_id, "end"))
        if reserve and end and not _fits(reserve, end):
            yield alerts.differs("end_does_not_fit", message, (reserve, end))


def _says_nothing(line: Line) -> bool:
    """An end at zero: where another end stands already it had nothing to add, and whoever sent it could not know."""
    return line.kind == "release" and not (line.prompt_tokens or line.output_tokens)


def _is_rework(line: Line, stands: Line) -> bool:
    """A count of what had been given up uncounted: its Submit crossed the Released. Its engine counts it as rework."""
    given_up = stands.kind == "release" and stands.attempt is None
    return given_up and line.attempt is not None and line.tenant_id == stands.tenant_id


def _standing(operation_ids: set[UUID]) -> Mapping[Slot, Line]:
    names = [field.name for field in fields(Line)]
    entries = LedgerEntry.objects.filter(operation_id__in=operation_ids, kind__in=["reserve", "settle", "release"])
    lines = (Line(**values) for values in entries.values(*names))
    return {line.slot: line for line in lines}


def _fits(reserve: Line, end: Line) -> bool:
    """An end belongs to its reservation's tenant; a counted one also to its class, model and prices, and stays within
    it.
    """
    if reserve.tenant_id != end.tenant_id:
        return False
    if end.attempt is None:
        return True
    same = (reserve.priority_class, reserve.model, reserve.price_version) == (
        end.priority_class,
        end.model,
        end.price_version,
    )
    return same and end.amount_micros <= reserve.amount_micros


def _tally(written: Sequence[Written], *, num_repeated: int, num_alerts: int) -> Applied:
    kinds = [one.line.kind for one in written]
    return Applied(
        num_reserved=kinds.count("reserve"),
        num_settled=kinds.count("settle"),
        num_released=kinds.count("release"),
        num_repeated=num_repeated,
        num_alerts=num_alerts,
    )
