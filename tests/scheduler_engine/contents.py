"""What would lie in the blocks of a device that obeys every plan: found out when a request reads somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_engine.plan import StepPlan
from scheduler_engine.request import Request
from tests.scheduler_engine.world import World

BLOCK = 16
Label = object  # a prefix key, or whose block it is and which


def prefix(name: str, num_blocks: int) -> tuple[bytes, ...]:
    """Keys of a prompt that begins with the text ``name``."""
    return tuple(f"{name}/{index}".encode() for index in range(num_blocks))


class Contents:
    """Always: every position a row attends to holds what was computed for that row's own prefix."""

    def __init__(self) -> None:
        self.device: dict[int, Label] = {}
        self.host: dict[int, Label] = {}

    def obey(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        for copy in plan.swap_out:
            self.host[copy.host_block] = self.device.get(copy.device_block)
        for copy in plan.swap_in:
            self.device[copy.device_block] = self.host.get(copy.host_block)
        for row in plan.rows:
            request, start, end = requests[row.request_id], row.start, row.start + len(row.token_ids)
            for index in range(start // BLOCK):
                found, due = self.device.get(row.block_table[index]), self._label(request, index)
                assert found == due, f"{row.request_id} reads {found} in block {index}"
            for index in range(start // BLOCK, -(-end // BLOCK)):
                is_full = end >= (index + 1) * BLOCK
                partial = (request.request_id, index, "in part")
                if start > index * BLOCK:
                    assert self.device.get(row.block_table[index]) == partial, (
                        f"{row.request_id} goes on in block {index}"
                    )
                self.device[row.block_table[index]] = self._label(request, index) if is_full else partial

    @staticmethod
    def _label(request: Request, index: int) -> Label:
        keys = request.prefix_keys
        return keys[index] if index < len(keys) else (request.request_id, index)


class SharingWorld(World):
    """Always: no row reads what is not its own prefix."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.contents = Contents()

    def obey(self, plan: StepPlan) -> None:
        self.contents.obey(plan, {i: story.request for i, story in self.stories.items()})
