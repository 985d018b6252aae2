"""Who is on the device: prefills and decodes in slots, held requests beside them, their sums, and when to look at whom.

Knows membership, aggregates and due dates; refuses to decide who enters or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.metering import Meter
from scheduler_engine.plan import DecodingSequence
from scheduler_engine.policy import PriorityClass
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

    def within(self, clock: int, num_steps: int) -> Iterator[LiveRequest]:
        """Those due at one of the ``num_steps`` moments after this one."""
        last = clock + num_steps
        moments = range(clock + 1, last + 1) if num_steps < len(self._due) else sorted(self._due)
        for due in moments:
            if due <= last:
                yield from self._due.get(due, _NOBODY).values()


class RunningSet:
    """Always: a member is in exactly one of prefilling, decoding and held; a decoding one is *seated*, gaining a token
    with each step, or sits out.

    ``decode_tokens`` sums ``total`` of the decoding and ``seated_tokens`` of the seated; ``at_block_edge`` are the
    decoding whose next token needs a new block, ``step_held`` those that sat out the last step for somebody's promise.
    A quiet step touches only those that are due: at a block edge, a limit or an estimate.
    """

    def __init__(self, block_size: int, meter: Meter) -> None:
        self.meter = meter
        self.prefilling: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.decoding: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.seated: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.held: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.at_block_edge: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.step_held: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.decode_tokens = [0 for _ in PriorityClass]
        self.seated_tokens = [0 for _ in PriorityClass]
        self.stop_ids: dict[int, int] = {}  # token id -> how many of the seated it would end
        self.num_slots_used = 0
        self._block_size = block_size
        self._sitting_out: Members = {}
        self._batch: DecodeBatch | None = None
        self._edges = Calendar()
        self._checks = Calendar()

    def add(self, live: LiveRequest) -> None:
        """A request enters a slot (PREFILL or DECODE) or stays held on the device."""
        rank = live.rank
        if live.state is State.DECODE:
            live.begin_decode()
            self.decoding[rank][live.request_id] = live
            self.decode_tokens[rank] += live.total
            self.num_slots_used += 1
            if self._is_at_edge(live):
                self.at_block_edge[rank][live.request_id] = live
            self._seat(live)
        elif live.state is State.PREFILL:
            self.prefilling[rank][live.request_id] = live
            self.num_slots_used += 1
        else:
            self.held[rank][live.request_id] = live

    def remove(self, live: LiveRequest) -> None:
        """A request leaves its slot or its place beside the slots. Call it before its state changes."""
        rank = live.rank
        if live.state is State.DECODE:
            if self._sitting_out.pop(live.request_id, None) is None:
                self._unseat(live)
            del self.decoding[rank][live.request_id]
            self.at_block_edge[rank].pop(live.request_id, None)
            self.step_held[rank].pop(live.request_id, None)
            self.decode_tokens[rank] -= live.total
            self.num_slots_used -= 1
            live.end_decode()
        elif live.state is State.PREFILL:
            del self.prefilling[rank][live.request_id]
            self.num_slots_used -= 1
        else:
            del self.held[rank][live.request_id]

    # seats

    def _seat(self, live: LiveRequest) -> None:
        rank = live.rank
        self.seated[rank][live.request_id] = live
        self.seated_tokens[rank] += live.total
        live.offset = offset = live.total - self.meter.clock
        live.tab.open(offset)
        live.account.tab.open(offset)
        for token_id in live.stop_ids:
            self.stop_ids[token_id] = self.stop_ids.get(token_id, 0) + 1
        self._await_edge(live)
        self._await_check(live)
        self._batch = None

    def _unseat(self, live: LiveRequest) -> None:
        rank = live.rank
        del self.seated[rank][live.request_id]
        self.seated_tokens[rank] -= live.total
        live.tab.close(live.offset)
        live.account.tab.close(live.offset)
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

    def sit_out(self, idle: Members) -> None:
        """Just these decodes get no row in the coming step; those that sat out before and are not among them do."""
        for live in [live for request_id, live in self._sitting_out.items() if request_id not in idle]:
            del self._sitting_out[live.request_id]
            self._seat(live)
        for request_id, live in idle.items():
            if request_id not in self._sitting_out:
                self._unseat(live)
                self._sitting_out[request_id] = live

    def lose_step(self, live: LiveRequest) -> None:
        """A seated decode had its row and got no token from it: it is seated no more."""
        self._unseat(live)
        self._sitting_out[live.request_id] = live

    def batch(self) -> DecodeBatch:
        """The seated by class. O(1) while they stay the same."""
        if self._batch is None:
            owners = tuple([live for members in self.seated for live in members.values()])
            self._batch = DecodeBatch(
                owners=owners,
                request_ids=tuple([live.request_id for live in owners]),
                sequences=tuple([live.sequence for live in owners]),
                outputs=tuple([live.output_ids for live in owners]),
            )
        return self._batch

    def advance(self) -> list[LiveRequest]:
        """Every seated decode has got its token. Returns those that have come to a limit or an estimate; those at the
        end of their blocks are noted.
        """
        for rank, members in enumerate(self.seated):
            self.decode_tokens[rank] += len(members)
            self.seated_tokens[rank] += len(members)
        self.meter.clock = clock = self.meter.clock + 1
        for live in self._edges.pop(clock).values():
            self.at_block_edge[live.rank][live.request_id] = live
        return list(self._checks.pop(clock).values())

    # due dates

    def grow(self, live: LiveRequest, block: int) -> None:
        """A decode at a block edge gets its next block."""
        live.block_table.append(block)
        del self.at_block_edge[live.rank][live.request_id]
        if live.request_id in self.seated[live.rank]:
            self._await_edge(live)

    def check_at(self, live: LiveRequest, total: int) -> None:
        """``advance`` shall return it once it has so many tokens."""
        live.check_total = total
        if live.request_id in self.seated[live.rank]:
            if live.check_clock > self.meter.clock:
                self._checks.remove(live.check_clock, live)
            self._await_check(live)

    def _await_edge(self, live: LiveRequest) -> None:
        live.edge_clock = len(live.block_table) * self._block_size + 1 - live.offset  # computed is one less than total
        if live.edge_clock > self.meter.clock:
            self._edges.put(live.edge_clock, live)

    def _await_check(self, live: LiveRequest) -> None:
        live.check_clock = max(live.check_total - live.offset, self.meter.clock + 1)
        self._checks.put(live.check_clock, live)

    def ending_within(self, num_steps: int) -> Iterator[tuple[LiveRequest, int]]:
        """Seated decodes that come to their token limit in at most ``num_steps``, and in how many."""
        clock = self.meter.clock
        for live in self._checks.within(clock, num_steps):
            left = live.finish_total - live.offset - clock
            if left <= num_steps:
                yield live, left

    # looking in

    def num_in_slots(self, rank: int) -> int:
        return len(self.prefilling[rank]) + len(self.decoding[rank])

    def on_device(self, rank: int) -> Iterator[LiveRequest]:
        """All of a class that own device blocks."""
        yield from self.decoding[rank].values()
        yield from self.prefilling[rank].values()
        yield from self.held[rank].values()

    def __iter__(self) -> Iterator[LiveRequest]:
        for rank in PriorityClass:
            yield from self.on_device(rank)

    def _is_at_edge(self, live: LiveRequest) -> bool:
        return live.computed == len(live.block_table) * self._block_size

    def check_books(self) -> None:
        """Raises BrokenBooks unless every sum and every due date is that of the members."""
        for rank in PriorityClass:
            self._check_class(rank)
        used = sum(self.num_in_slots(rank) for rank in PriorityClass)
        if used != self.num_slots_used:
            raise BrokenBooks(f"{self.num_slots_used} slots used, counted {used}")

    def _check_class(self, rank: PriorityClass) -> None:
        decoding, seated = self.decoding[rank], self.seated[rank]
        for name, members, known in (
            ("decodes", decoding, self.decode_tokens[rank]),
            ("is seated", seated, self.seated_tokens[rank]),
        ):
            tokens = sum(live.total for live in members.values())
            if tokens != known:
                raise BrokenBooks(f"class {rank.label} {name} over {known} tokens, counted {tokens}")
        edge = {request_id for request_id, live in decoding.items() if self._is_at_edge(live)}
        if edge != self.at_block_edge[rank].keys():
            raise BrokenBooks(f"class {rank.label}: the list of decodes at a block edge is wrong")
        if not self.step_held[rank].keys() <= decoding.keys():
            raise BrokenBooks(f"class {rank.label}: a request is held for step time that does not decode")
        sitting_out = {request_id for request_id, live in self._sitting_out.items() if live.rank == rank}
        if seated.keys() | sitting_out != decoding.keys() or seated.keys() & sitting_out:
            raise BrokenBooks(f"class {rank.label}: a decode is neither seated nor sitting out, or both")
        for live in seated.values():
            due = live.check_clock > self.meter.clock
            if live.offset != live.total - self.meter.clock or not due or live.debtor is not None:
                raise BrokenBooks(f"{live.request_id} decodes with offset {live.offset}, due at {live.check_clock}")
