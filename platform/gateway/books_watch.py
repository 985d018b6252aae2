"""The books compared with their witness while traffic runs: engines against ledger, ledger against roll-ups.

Run by the settler, the one process that writes the ledger, between two of its batches: nothing is written meanwhile.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Protocol
from uuid import UUID

from billing import alerts, engine_counts, rollups, selectors
from billing.engine_counts import EngineTotals
from billing.models import LedgerEntry
from wire.bus import BadEntry
from wire.messages import Released, ToLedger, Usage

log = logging.getLogger(__name__)

MOST_WAITING = 20_000
TRIES = 3
RECENT = timedelta(hours=2)


class BooksGate(Protocol):
    """The part of ``gateway.gate.Gate`` that a comparison needs."""

    def counted_and_waiting(self, most: int) -> tuple[list[EngineTotals], list[ToLedger | BadEntry] | None]: ...

    def tell_books(self, document: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One look. Differences are left minus right, of one and the same moment, and always 0."""

    at: str
    engine_ledger_prompt_tokens: int
    engine_ledger_output_tokens: int
    wrong_rollups: int
    num_waiting: int
    num_open_alerts: int

    @property
    def is_right(self) -> bool:
        return not (self.engine_ledger_prompt_tokens or self.engine_ledger_output_tokens or self.wrong_rollups)


class BooksWatch:
    """Always: every worker epoch's totals are kept; a difference is an alert row, a log line and a metric."""

    def __init__(
        self, gate: BooksGate, *, clock_s: Callable[[], float], now: Callable[[], datetime], every_s: float
    ) -> None:
        self._gate = gate
        self._clock_s = clock_s
        self._now = now
        self._every_s = every_s
        self._due_s = clock_s()
        self._epochs: frozenset[tuple[str, int]] = frozenset()

    def run(self) -> Comparison | None:
        """Keeps the totals; compares where it is time, or a worker has started since."""
        totals, waiting = self._gate.counted_and_waiting(MOST_WAITING)
        engine_counts.keep(totals)
        epochs = frozenset((total.worker_id, total.epoch) for total in totals)
        if waiting is None or (epochs == self._epochs and self._clock_s() < self._due_s):
            return None
        found = self._compare()
        if found is not None:
            self._epochs, self._due_s = epochs, self._clock_s() + self._every_s
            self._tell(found)
        return found

    def _compare(self) -> Comparison | None:
        """None where the ledger was written to in each of the tries: by a second settler."""
        for _ in range(TRIES):
            before = _last_entry()
            totals, waiting = self._gate.counted_and_waiting(MOST_WAITING)
            if waiting is None:
                return None
            engine_counts.keep(totals)
            found = self._difference(waiting)
            if _last_entry() == before:
                return found
        return None

    def _difference(self, waiting: Sequence[ToLedger | BadEntry]) -> Comparison:
        engine, booked, still = selectors.engine_sums(), selectors.rollup_sums(), _not_yet_booked(waiting)
        now = self._now()
        return Comparison(
            at=now.isoformat(),
            engine_ledger_prompt_tokens=engine[0] - booked.prompt_tokens - still[0],
            engine_ledger_output_tokens=engine[1] - booked.output_tokens - still[1],
            wrong_rollups=rollups.num_wrong_rows(since=now - RECENT),
            num_waiting=len(waiting),
            num_open_alerts=selectors.num_open_alerts(),
        )

    def _tell(self, found: Comparison) -> None:
        self._gate.tell_books(json.dumps(asdict(found)))
        if not found.is_right:
            log.error("the books differ: %s", found)
            what = f"prompt {found.engine_ledger_prompt_tokens}, output {found.engine_ledger_output_tokens}"
            detail = f"engine - ledger: {what}; wrong roll-up rows: {found.wrong_rollups}"
            alerts.record([alerts.Finding("books", "books_differ", detail)])


def _last_entry() -> int:
    newest = LedgerEntry.objects.order_by("-id").values_list("id", flat=True).first()
    return newest or 0


def _not_yet_booked(waiting: Sequence[ToLedger | BadEntry]) -> tuple[int, int]:
    """(prompt, output) tokens that engines have counted and the ledger will: of each operation's first end that waits,
    where it has none yet. What comes after an end is rework, and engines count it apart.
    """
    first: dict[UUID, tuple[int, int]] = {}
    for message in waiting:
        if isinstance(message, Usage):
            first.setdefault(UUID(message.response_id), (message.prompt_tokens, message.output_tokens))
        elif isinstance(message, Released):
            first.setdefault(UUID(message.response_id), (0, 0))
    ended = LedgerEntry.objects.filter(operation_id__in=list(first), kind__in=selectors.ENDS)
    for operation_id in ended.values_list("operation_id", flat=True):
        first.pop(operation_id, None)
    return sum(prompt for prompt, _ in first.values()), sum(output for _, output in first.values())
