"""From the durable usage stream into the books. Knows the wire and the ledger; refuses to count or to price anything.

An entry is acknowledged after the commit that wrote it, so a crash at any point only repeats what the ledger
recognises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from django.db import connection

from billing import alerts, ledger
from billing.messages import Counters, LedgerMessage, Release, Reservation, Settlement
from billing.pricing import Terminal, TokenCounts
from gateway.postgresql import AWAY
from scheduler_engine.policy import PriorityClass
from wire.bus import BadEntry, BusError, UsageEntry, UsageReader
from wire.messages import EngineCounters, Released, Reserved, ToLedger, Usage

log = logging.getLogger(__name__)

READ_S = 0.5
GATHER_S = 0.1  # after a batch that was not full: read as they come, each entry would cost a transaction
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class UnreadableUsage(Exception):
    """A well-formed message whose content is none of ours: an id that is no UUID, an impossible count."""


@dataclass(frozen=True, slots=True)
class Duty:
    """Something to be done every ``every_s`` seconds, between two batches, and short; by default only while the stream
    is empty.
    """

    every_s: float
    run: Callable[[], object]
    under_load: bool = False


class Settler:
    """Always: what was acknowledged is in the books or in the alerts. Outages of either side are waited out."""

    def __init__(
        self,
        reader: UsageReader,
        *,
        clock_s: Callable[[], float],
        stopped_after: Callable[[float], bool],
        duties: Sequence[Duty] = (),
    ) -> None:
        """``stopped_after(seconds)`` waits that long and says whether to stop (``threading.Event.wait``)."""
        self._reader = reader
        self._clock_s = clock_s
        self._stopped_after = stopped_after
        self._duties = duties
        self._due_s = [clock_s()] * len(duties)
        self.applied = ledger.Applied()

    def run(self) -> None:
        """Until told to stop; what gathers just then is booked first. Says so once when an outage begins and once when
        it ends.
        """
        outage_s, gather_s, is_told = 0.0, 0.0, False
        while not is_told:
            is_told = self._stopped_after(outage_s or gather_s)
            if is_told and not gather_s:
                return
            try:
                num_entries = self._turn()
            except (BusError, *AWAY) as error:
                if not outage_s:
                    log.warning("the books wait: %s", _one_line(error))
                outage_s, gather_s = min(LONGEST_PAUSE_S, 2 * outage_s or FIRST_PAUSE_S), 0.0
                connection.close()
            else:
                if outage_s:
                    log.info("the books go on")
                outage_s, gather_s = 0.0, GATHER_S if 0 < num_entries < ledger.MAX_BATCH else 0.0

    def _turn(self) -> int:
        num_entries = self.settle_some()
        self._do_duties(not num_entries)
        return num_entries

    def settle_some(self) -> int:
        """Reads, writes, acknowledges; returns how many entries there were. Raises what reader and database raise."""
        entries = self._reader.read(ledger.MAX_BATCH, READ_S)
        messages: list[LedgerMessage] = []
        findings: list[alerts.Finding] = []
        for entry in entries:
            try:
                messages.append(ledger_message(entry.message))
            except UnreadableUsage as error:
                findings.append(alerts.unreadable(entry.entry_id, str(error)))
        for start in range(0, len(messages), ledger.MAX_BATCH):  # one entry may hold several messages
            self.applied += ledger.apply_surely(messages[start : start + ledger.MAX_BATCH])
        if findings:
            self.applied += ledger.Applied(num_refused=len(findings), num_alerts=alerts.record(findings))
        self._reader.acknowledge(_ids(entries))
        return len(entries)

    def _do_duties(self, is_idle: bool) -> None:
        now_s = self._clock_s()
        for index, duty in enumerate(self._duties):
            if now_s >= self._due_s[index] and (is_idle or duty.under_load):
                duty.run()
                self._due_s[index] = now_s + duty.every_s


def ledger_message(message: ToLedger | BadEntry) -> LedgerMessage:
    """The Bus's words in the books' words. Raises UnreadableUsage."""
    if isinstance(message, BadEntry):
        raise UnreadableUsage(message.reason)
    try:
        return _translate(message)
    except ValueError as error:
        raise UnreadableUsage(f"{error}: {message!r}") from error


def _translate(message: ToLedger) -> LedgerMessage:
    operation_id, tenant_id = UUID(message.response_id), UUID(message.tenant_id)
    match message:
        case Reserved():
            return Reservation(
                operation_id=operation_id,
                tenant_id=tenant_id,
                project_id=UUID(message.project_id),
                key_id=UUID(message.key_id) if message.key_id else None,
                priority_class=message.priority_class.label,
                model=message.model,
                source=message.source,
                money_micros=message.money_micros,
                reserved_tokens=message.reserved_tokens,
                window_id=message.window_id,
                policy_version=message.policy_version,
                price_version=message.price_version,
                requested_class=_label(message.requested_class),
            )
        case Usage():
            return Settlement(
                operation_id=operation_id,
                attempt=message.attempt,
                tenant_id=tenant_id,
                project_id=UUID(message.project_id),
                key_id=UUID(message.key_id) if message.key_id else None,
                priority_class=message.priority_class.label,
                model=message.model,
                counts=TokenCounts(message.prompt_tokens, message.cached_tokens, message.output_tokens),
                terminal=Terminal(message.terminal),
                policy_version=message.policy_version,
                price_version=message.price_version,
                counters=_counters(message.counters),
                requested_class=_label(message.requested_class),
            )
        case Released():
            return Release(operation_id=operation_id, tenant_id=tenant_id, reason=message.reason)
        case _:
            assert_never(message)


def _label(priority_class: PriorityClass | None) -> str:
    return "" if priority_class is None else priority_class.label


def _counters(counters: EngineCounters) -> Counters:
    return Counters(
        queue_us=counters.queue_us,
        ttft_us=counters.ttft_us,
        total_us=counters.total_us,
        gpu_us=counters.gpu_us,
        num_steps=counters.num_steps,
        num_preemptions=counters.num_holds + counters.num_swaps + counters.num_recomputes,
        recomputed_tokens=counters.recomputed_tokens,
        swapped_bytes=counters.swapped_bytes,
    )


def _ids(entries: Sequence[UsageEntry]) -> list[str]:
    return list(dict.fromkeys(entry.entry_id for entry in entries))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
