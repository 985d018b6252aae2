"""Decodes of one class that gain a token with every step the class takes part in: their columns, price and due dates.

Knows who is seated; refuses to decide who is. A quiet step touches only those that are due: at the end of their blocks,
at a limit or at an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import LiveRequest
from scheduler_engine.metering import Meter
from scheduler_engine.plan import DecodingSequence
from scheduler_engine.request import RequestId

Members = dict[RequestId, LiveRequest]  # in order of entry
_NOBODY: Members = {}


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Those that get a decode row, as aligned columns: the same object for as long as they are the same requests."""

    owners: tuple[LiveRequest, ...]
    request_ids: tuple[RequestId, ...]
    sequences: tuple[DecodingSequence, ...]
    outputs: tuple[list[int], ...]


NO_BATCH = DecodeBatch((), (), (), ())


def joined(batches: list[DecodeBatch]) -> DecodeBatch:
    """One after the other."""
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return NO_BATCH
    return DecodeBatch(
        owners=tuple(chain.from_iterable([batch.owners for batch in batches])),
        request_ids=tuple(chain.from_iterable([batch.request_ids for batch in batches])),
        sequences=tuple(chain.from_iterable([batch.sequences for batch in batches])),
        outputs=tuple(chain.from_iterable([batch.outputs for batch in batches])),
    )


class Calendar:
    """Requests by the clock at which they are due."""

    def __init__(self) -> None:
        self._due: dict[int, Members] = {}

    def put(self, clock: int, live: LiveRequest) -> None:
        members = self._due.get(clock)
        if members is None:
            self._due[clock] = {live.request_id: live}
        else:
            members[live.request_id] = live

    def remove(self, clock: int, live: LiveRequest) -> None:
        members = self._due[clock]
        del members[live.request_id]
        if not members:
            del self._due[clock]

    def pop(self, clock: int) -> Members:
        return self._due.pop(clock, _NOBODY)

    def first(self) -> int:
        """When the first is due. Raises ValueError where nobody is in it."""
        return min(self._due)

    def within(self, clock: int, num_steps: int) -> Iterator[LiveRequest]:
        """Those due at one of the ``num_steps`` moments after this one."""
        last = clock + num_steps
        moments = range(clock + 1, last + 1) if num_steps < len(self._due) else sorted(self._due)
        for due in moments:
            if due <= last:
                yield from self._due.get(due, _NOBODY).values()


class Seats:
    """Always: for every member ``offset = total - clock``; it is on its own tab, its tenant's, and in the calendar of
    checks; ``num_tokens`` sums their totals.
    """

    def __init__(self, rank: int, block_size: int) -> None:
        self.rank = rank
        self.meter = Meter()
        self.members: Members = {}
        self.num_tokens = 0
        self.stop_ids: dict[int, int] = {}  # token id -> how many members it would end
        self._block_size = block_size
        self._batch: DecodeBatch | None = None
        self._edges = Calendar()
        self._checks = Calendar()

    def seat(self, live: LiveRequest) -> None:
        self.members[live.request_id] = live
        self.num_tokens += live.total
        live.offset = offset = live.total - self.meter.clock
        live.tab.open(offset)
        live.account.open(offset)
        for token_id in live.stop_ids:
            self.stop_ids[token_id] = self.stop_ids.get(token_id, 0) + 1
        self.await_edge(live)
        self.await_check(live)
        self._batch = None

    def unseat(self, live: LiveRequest) -> None:
        del self.members[live.request_id]
        self.num_tokens -= live.offset + self.meter.clock
        live.tab.close(live.offset)
        live.account.close(live.offset)
        for token_id in live.stop_ids:
            if self.stop_ids[token_id] == 1:
                del self.stop_ids[token_id]
            else:
                self.stop_ids[token_id] -= 1
        if live.edge_clock > self.meter.clock:
            self._edges.remove(live.edge_clock, live)
        if live.check_clock > self.meter.clock:
            self._checks.remove(live.check_clock, live)
        self._batch = None

    def batch(self) -> DecodeBatch:
        """O(1) while the members stay the same."""
        if self._batch is None:
            owners = tuple(self.members.values())
            self._batch = DecodeBatch(
                owners=owners,
                request_ids=tuple(self.members),
                sequences=tuple([live.sequence for live in owners]),
                outputs=tuple([live.output_ids for live in owners]),
            )
        return self._batch

    def advance(self) -> tuple[Members, Members]:
        """Every member has got its token. Returns those at the end of their blocks, and those at a limit or an
        estimate.
        """
        self.num_tokens += len(self.members)
        self.meter.clock += 1
        return self._edges.pop(self.meter.clock), self._checks.pop(self.meter.clock)

    def num_steps_to_check(self) -> int:
        """How often ``advance`` returns nobody at a limit or an estimate."""
        return self._checks.first() - self.meter.clock - 1

    def await_edge(self, live: LiveRequest) -> None:
        live.edge_clock = len(live.block_table) * self._block_size + 1 - live.offset  # computed is one less than total
        if live.edge_clock > self.meter.clock:
            self._edges.put(live.edge_clock, live)

    def await_check(self, live: LiveRequest) -> None:
        live.check_clock = max(live.check_total - live.offset, self.meter.clock + 1)
        self._checks.put(live.check_clock, live)

    def check_at(self, live: LiveRequest, total: int) -> None:
        """``advance`` shall return it once it has so many tokens."""
        if live.check_clock > self.meter.clock:
            self._checks.remove(live.check_clock, live)
        live.check_total = total
        self.await_check(live)

    def ending_within(self, num_steps: int) -> Iterator[tuple[LiveRequest, int]]:
        """Members that come to their token limit in at most ``num_steps``, and in how many."""
        for live in self._checks.within(self.meter.clock, num_steps):
            left = live.finish_total - live.offset - self.meter.clock
            if left <= num_steps:
                yield live, left

    def check_books(self) -> None:
        """Raises BrokenBooks unless every sum and every due date is that of the members."""
        tokens = sum(live.total for live in self.members.values())
        if tokens != self.num_tokens:
            raise BrokenBooks(f"the seated decode over {self.num_tokens} tokens, counted {tokens}")
        for live in self.members.values():
            is_due = live.check_clock > self.meter.clock
            if live.offset != live.total - self.meter.clock or not is_due or live.debtor is not None:
                raise BrokenBooks(f"{live.request_id} decodes with offset {live.offset}, due at {live.check_clock}")
