"""Who is on the device: prefills and decodes in slots, held requests beside them, and their sums per class.

Knows membership and aggregates; refuses to decide who enters or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import RANKS, PriorityClass
from scheduler_engine.request import RequestId
from scheduler_engine.seats import NO_BATCH, DecodeBatch, Members, Seats, joined


class RunningSet:
    """Always: a member is in exactly one of prefilling, decoding and held; a decoding one is seated or sits out.

    ``decode_tokens`` sums ``total`` of the decoding; ``at_block_edge`` are the decoding whose next token needs a new
    block, ``step_held`` those that sat out the last step for somebody's promise. A class of which nobody gets a row
    rests: its seats stay as they are, and its clock stands still.
    """

    def __init__(self, block_size: int) -> None:
        self.prefilling: tuple[Members, ...] = tuple({} for _ in RANKS)
        self.decoding: tuple[Members, ...] = tuple({} for _ in RANKS)
        self.held: tuple[Members, ...] = tuple({} for _ in RANKS)
        self.at_block_edge: tuple[Members, ...] = tuple({} for _ in RANKS)
        self.step_held: tuple[Members, ...] = tuple({} for _ in RANKS)
        self.seats = tuple(Seats(rank, block_size) for rank in RANKS)
        self.decode_tokens = [0 for _ in RANKS]
        self.num_slots_used = 0
        self._block_size = block_size
        self._sitting_out: tuple[Members, ...] = tuple({} for _ in RANKS)
        self._is_resting = [False for _ in RANKS]
        self._taking_part: list[Seats] | None = None  # until a seat is taken or left, or a class rests or wakes
        self._batches: list[DecodeBatch] = []
        self._batch = NO_BATCH
        self._batch_of: list[Seats] | None = None  # those who took part when it was made

    def add(self, live: LiveRequest) -> None:
        """A request enters a slot (PREFILL or DECODE) or stays held on the device."""
        rank = live.rank
        self._taking_part = None
        if live.state is State.DECODE:
            live.begin_decode()
            self.decoding[rank][live.request_id] = live
            self.decode_tokens[rank] += live.total
            self.num_slots_used += 1
            if self._is_at_edge(live):
                self.at_block_edge[rank][live.request_id] = live
            self.seats[rank].seat(live)
        elif live.state is State.PREFILL:
            self.prefilling[rank][live.request_id] = live
            self.num_slots_used += 1
        else:
            self.held[rank][live.request_id] = live

    def remove(self, live: LiveRequest) -> None:
        """A request leaves its slot or its place beside the slots. Call it before its state changes."""
        rank = live.rank
        self._taking_part = None
        if live.state is State.DECODE:
            if self._sitting_out[rank].pop(live.request_id, None) is None:
                self.seats[rank].unseat(live)
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

    # the step

    def sit_out(self, idle: Mapping[RequestId, LiveRequest]) -> None:
        """Just these decodes get no row in the coming step."""
        if not idle and not any(self._sitting_out) and not any(self._is_resting):
            return
        self._taking_part = None
        num_idle = [0 for _ in RANKS]
        for live in idle.values():
            num_idle[live.rank] += 1
        for rank in RANKS:
            self._is_resting[rank] = 0 < num_idle[rank] == len(self.decoding[rank])
            if not self._is_resting[rank] and (num_idle[rank] or self._sitting_out[rank]):
                self._part(rank, idle)

    def _part(self, rank: int, idle: Mapping[RequestId, LiveRequest]) -> None:
        seats, sitting_out = self.seats[rank], self._sitting_out[rank]
        for live in [live for request_id, live in sitting_out.items() if request_id not in idle]:
            del sitting_out[live.request_id]
            seats.seat(live)
        for live in [live for request_id, live in seats.members.items() if request_id in idle]:
            self.lose_step(live)

    def lose_step(self, live: LiveRequest) -> None:
        """A seated decode gets no token: it is seated no more."""
        self._taking_part = None
        self.seats[live.rank].unseat(live)
        self._sitting_out[live.rank][live.request_id] = live

    def taking_part(self) -> list[Seats]:
        """Seats of the classes that do not rest, by rank."""
        found = self._taking_part
        if found is None:
            pairs = zip(self.seats, self._is_resting, strict=True)
            found = self._taking_part = [seats for seats, is_resting in pairs if seats.members and not is_resting]
        return found

    def batch(self) -> DecodeBatch:
        """Those who get a decode row, by class. O(1) while they stay the same."""
        taking_part = self.taking_part()
        if taking_part is self._batch_of:
            return self._batch
        self._batch_of = taking_part
        batches = [seats.batch() for seats in taking_part]
        if len(batches) != len(self._batches) or any(
            one is not other for one, other in zip(batches, self._batches, strict=True)
        ):
            self._batches, self._batch = batches, joined(batches)
        return self._batch

    def may_stop(self, token_ids: Sequence[int]) -> bool:
        """True when one of these tokens ends some decode, though perhaps not the one it was drawn for."""
        return any(not seats.stop_ids.keys().isdisjoint(token_ids) for seats in self.seats if seats.stop_ids)

    @property
    def is_quiet(self) -> bool:
        """True while all who are here decode, get a row in each step and are ended by no token."""
        busy = (*self.prefilling, *self.held, *self.step_held, *self._sitting_out)
        stop_ids = [seats.stop_ids for seats in self.seats]
        return any(self.decoding) and not (any(busy) or any(self._is_resting) or any(stop_ids))

    def num_steps_to_check(self) -> int:
        """Steps that bring nobody to a limit or an estimate, if the same decode. Only while somebody decodes."""
        return min([seats.num_steps_to_check() for seats in self.taking_part()])

    def advance(self) -> tuple[list[LiveRequest], list[LiveRequest]]:
        """Every seated decode has got its token. Returns those that have come to a limit or an estimate, and those at
        the end of their blocks, which are noted too.
        """
        due: list[LiveRequest] = []
        filled: list[LiveRequest] = []
        for rank, seats in enumerate(self.seats):
            if self._is_resting[rank] or not seats.members:
                continue
            self.decode_tokens[rank] += len(seats.members)
            at_edge, to_check = seats.advance()
            if at_edge:
                self.at_block_edge[rank].update(at_edge)
                filled.extend(at_edge.values())
            due.extend(to_check.values())
        return due, filled

    def grow(self, live: LiveRequest, block: int) -> None:
        """A decode at a block edge gets its next block."""
        live.block_table.append(block)
        rank = live.rank
        del self.at_block_edge[rank][live.request_id]
        if live.request_id not in self._sitting_out[rank]:
            self.seats[rank].await_edge(live)

    def check_at(self, live: LiveRequest, total: int) -> None:
        """``advance`` shall return it once it has so many tokens."""
        if live.request_id in self.seats[live.rank].members:
            self.seats[live.rank].check_at(live, total)
        else:
            live.check_total = total

    # looking in

    def ending_within(self, num_steps: int) -> Iterator[tuple[LiveRequest, int]]:
        """Seated decodes that come to their token limit in at most ``num_steps``, and in how many."""
        for seats in self.seats:
            yield from seats.ending_within(num_steps)

    def num_in_slots(self, rank: int) -> int:
        return len(self.prefilling[rank]) + len(self.decoding[rank])

    def on_device(self, rank: int) -> Iterator[LiveRequest]:
        """All of a class that own device blocks."""
        yield from self.decoding[rank].values()
        yield from self.prefilling[rank].values()
        yield from self.held[rank].values()

    def __iter__(self) -> Iterator[LiveRequest]:
        for rank in RANKS:
            yield from self.on_device(rank)

    def _is_at_edge(self, live: LiveRequest) -> bool:
        return live.computed == len(live.block_table) * self._block_size

    def check_books(self) -> None:
        """Raises BrokenBooks unless every sum and every list is that of the members."""
        for rank in PriorityClass:
            self._check_class(rank)
        used = sum(self.num_in_slots(rank) for rank in RANKS)
        if used != self.num_slots_used:
            raise BrokenBooks(f"{self.num_slots_used} slots used, counted {used}")

    def _check_class(self, rank: PriorityClass) -> None:
        decoding, seated, sitting_out = self.decoding[rank], self.seats[rank].members, self._sitting_out[rank]
        tokens = sum(live.total for live in decoding.values())
        if tokens != self.decode_tokens[rank]:
            raise BrokenBooks(f"class {rank.label} decodes over {self.decode_tokens[rank]} tokens, counted {tokens}")
        edge = {request_id for request_id, live in decoding.items() if self._is_at_edge(live)}
        if edge != self.at_block_edge[rank].keys():
            raise BrokenBooks(f"class {rank.label}: the list of decodes at a block edge is wrong")
        if not self.step_held[rank].keys() <= decoding.keys():
            raise BrokenBooks(f"class {rank.label}: a request is held for step time that does not decode")
        if seated.keys() | sitting_out.keys() != decoding.keys() or seated.keys() & sitting_out.keys():
            raise BrokenBooks(f"class {rank.label}: a decode is neither seated nor sitting out, or both")
        self.seats[rank].check_books()
