"""Who is on the device: prefills and decodes in slots, held requests beside them, and their sums per class.

Knows membership and aggregates; refuses to decide who enters or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import LiveRequest, State
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId

Members = dict[RequestId, LiveRequest]  # in order of entry


class RunningSet:
    """Always: a member is in exactly one of prefilling, decoding and held; ``decode_tokens`` sums ``total`` of the
    decoding; ``at_block_edge`` are the decoding whose next token needs a new block, ``step_held`` those that sat out
    the last step.
    """

    def __init__(self) -> None:
        self.prefilling: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.decoding: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.held: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.at_block_edge: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.step_held: tuple[Members, ...] = tuple({} for _ in PriorityClass)
        self.decode_tokens = [0 for _ in PriorityClass]
        self.num_slots_used = 0

    def add(self, live: LiveRequest, block_size: int) -> None:
        """A request enters a slot (PREFILL or DECODE) or stays held on the device."""
        rank = live.rank
        if live.state is State.DECODE:
            self.decoding[rank][live.request_id] = live
            self.decode_tokens[rank] += live.total
            self.num_slots_used += 1
            if live.computed == len(live.block_table) * block_size:
                self.at_block_edge[rank][live.request_id] = live
        elif live.state is State.PREFILL:
            self.prefilling[rank][live.request_id] = live
            self.num_slots_used += 1
        else:
            self.held[rank][live.request_id] = live

    def remove(self, live: LiveRequest) -> None:
        """A request leaves its slot or its place beside the slots. Call it before its state changes."""
        rank = live.rank
        if live.state is State.DECODE:
            del self.decoding[rank][live.request_id]
            self.at_block_edge[rank].pop(live.request_id, None)
            self.step_held[rank].pop(live.request_id, None)
            self.decode_tokens[rank] -= live.total
            self.num_slots_used -= 1
        elif live.state is State.PREFILL:
            del self.prefilling[rank][live.request_id]
            self.num_slots_used -= 1
        else:
            del self.held[rank][live.request_id]

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

    def check_books(self, block_size: int) -> None:
        """Raises BrokenBooks unless every sum is that of the members."""
        for rank in PriorityClass:
            tokens = sum(live.total for live in self.decoding[rank].values())
            if tokens != self.decode_tokens[rank]:
                raise BrokenBooks(
                    f"class {rank.label} decodes over {self.decode_tokens[rank]} tokens, counted {tokens}"
                )
            edge = {i for i, live in self.decoding[rank].items() if live.computed == len(live.block_table) * block_size}
            if edge != self.at_block_edge[rank].keys():
                raise BrokenBooks(f"class {rank.label}: the list of decodes at a block edge is wrong")
            if not self.step_held[rank].keys() <= self.decoding[rank].keys():
                raise BrokenBooks(f"class {rank.label}: a request is held for step time that does not decode")
        used = sum(self.num_in_slots(rank) for rank in PriorityClass)
        if used != self.num_slots_used:
            raise BrokenBooks(f"{self.num_slots_used} slots used, counted {used}")
