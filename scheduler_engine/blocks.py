"""A pool of equal blocks, on the device or on the host, with books.

Knows block numbers and who owns them; refuses to know what is in a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.request import RequestId


class BlockPool:
    """Always: every block is free, fenced or owned, exactly one of them. (``PrefixPool`` has a fourth place.)"""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.num_owned = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._fenced: dict[RequestId, list[int]] = {}
        self._num_fenced = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free too, and perhaps of use as they are."""
        return 0

    @property
    def num_fenced(self) -> int:
        return self._num_fenced

    def take(self, count: int) -> list[int]:
        """``count`` blocks, now owned by the caller. Raises BrokenBooks where the caller did not look first."""
        if count > len(self._free):
            raise BrokenBooks(f"{self.name} pool: {count} blocks taken, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        self.num_owned += count
        return taken

    def take_one(self) -> int:
        """One block, now owned by the caller."""
        self.num_owned += 1
        return self._free.pop()

    def give(self, blocks: Sequence[int]) -> None:
        """Owned blocks become free."""
        self.num_owned -= len(blocks)
        self._free.extend(reversed(blocks))

    def fence(self, request_id: RequestId, blocks: Sequence[int]) -> None:
        """Owned blocks are set apart until a copy of ``request_id`` has completed."""
        if request_id in self._fenced:
            raise BrokenBooks(f"{self.name} pool: {request_id} already has a fence")
        self._fenced[request_id] = list(blocks)
        self._num_fenced += len(blocks)
        self.num_owned -= len(blocks)

    def is_fenced(self, request_id: RequestId) -> bool:
        return request_id in self._fenced

    def lift_fence(self, request_id: RequestId) -> None:
        """The copy has completed: its blocks are free."""
        blocks = self._fenced.pop(request_id)
        self._num_fenced -= len(blocks)
        self._free.extend(reversed(blocks))

    def check_totals(self) -> None:
        """O(1). Raises BrokenBooks unless free + fenced + owned = all."""
        counted = self.num_free + self._num_fenced + self.num_owned
        if counted != self.num_blocks or self.num_owned < 0:
            raise BrokenBooks(
                f"{self.name} pool: {self.num_free} free + {self._num_fenced} fenced + {self.num_owned} owned"
                f" is not {self.num_blocks}"
            )

    def check_books(self, owners: Mapping[RequestId, Iterable[int]]) -> None:
        """O(blocks). Raises BrokenBooks unless each block has exactly one place and each owned block one owner."""
        self.check_totals()
        place: dict[int, str] = {}
        for label, blocks in self._places(owners):
            for block in blocks:
                if block in place:
                    raise BrokenBooks(f"{self.name} pool: block {block} is both {place[block]} and {label}")
                place[block] = label
        if len(place) != self.num_blocks:
            raise BrokenBooks(f"{self.name} pool: {len(place)} blocks found, {self.num_blocks} exist")

    def _places(self, owners: Mapping[RequestId, Iterable[int]]) -> Iterable[tuple[str, Iterable[int]]]:
        yield "free", self._free
        for request_id, blocks in self._fenced.items():
            yield f"fenced for {request_id}", blocks
        for request_id, owned in owners.items():
            yield f"owned by {request_id}", owned
