"""Blocks that are on the host already although their request still runs: who has them, and how many there are.

Knows copies ahead of need; refuses to decide whose are worth making (``save_ahead``).
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.live import ON_DEVICE, LiveRequest
from scheduler_engine.request import RequestId


class Checkpoints:
    """Always: a member is on the device, and its ``host_blocks`` hold the first of its blocks, full ones, as they are
    for good; ``num_blocks`` sums them.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_ever = 0
        self.likely: list[LiveRequest] = []  # victims, the likeliest first, when they were last looked for
        self.look_again_step = 0
        self._members: dict[RequestId, LiveRequest] = {}  # likeliest first, as they were thought to be

    def note(self, live: LiveRequest, count: int) -> None:
        """``count`` more of its blocks are on their way."""
        self._members[live.request_id] = live
        self.num_blocks += count
        self.num_ever += count

    def close(self, live: LiveRequest) -> None:
        """It leaves the device, or loses what was saved; nothing for one that has nothing saved. Call it while it still
        has its ``host_blocks``.
        """
        if self._members.pop(live.request_id, None) is not None:
            self.num_blocks -= len(live.host_blocks)

    def last(self) -> LiveRequest:
        """Who would be missed least. There must be one."""
        return next(reversed(self._members.values()))

    def unlikely(self) -> list[LiveRequest]:
        """Members that are not among the likely victims."""
        likely = {live.request_id for live in self.likely}
        return [live for request_id, live in self._members.items() if request_id not in likely]

    def lag(self, lives: Mapping[RequestId, LiveRequest], block_size: int) -> int:
        """Full blocks of the likeliest victims that are not saved."""
        running = [live for live in self.likely if live.request_id in lives and live.state in ON_DEVICE]
        return sum(live.computed // block_size - len(live.host_blocks) for live in running)

    def check_books(self, lives: Mapping[RequestId, LiveRequest], block_size: int) -> None:
        """Raises BrokenBooks unless the members are those on the device that have host blocks."""
        found = {i: live for i, live in lives.items() if live.host_blocks and live.state in ON_DEVICE}
        if found.keys() != self._members.keys():
            raise BrokenBooks(f"saved ahead: {sorted(found.keys() ^ self._members.keys())} are in the wrong place")
        num_blocks = sum(len(live.host_blocks) for live in found.values())
        if num_blocks != self.num_blocks:
            raise BrokenBooks(f"saved ahead: {self.num_blocks} blocks, counted {num_blocks}")
        for live in found.values():
            if len(live.host_blocks) * block_size > live.computed:
                raise BrokenBooks(f"{live.request_id} has {len(live.host_blocks)} blocks saved, not all of them full")
