"""Device blocks that outlive their request: known by the prefix whose keys and values they hold, shared, and evicted in
least-recently-used order.

Knows keys, blocks and how many own them; refuses to know tokens, tenants and requests: who has the key may have it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from scheduler_engine.blocks import BlockPool
from scheduler_engine.errors import BrokenBooks
from scheduler_engine.request import RequestId


class PrefixPool(BlockPool):
    """Always: every block is free, fenced, cached or owned. One that was ever known counts its owners, a fence among
    them, and is cached when it has none; any other has one owner. A key names one block.
    """

    def __init__(self, name: str, num_blocks: int) -> None:
        super().__init__(name, num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._num_owners: dict[int, int] = {}  # of those that were ever known
        self._cached: OrderedDict[int, None] = OrderedDict()  # without owner, oldest first
        self.num_shared = 0  # with two owners or more

    @property
    def num_free(self) -> int:
        """Free and cached: a cached block is there for whoever needs one."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    # prefixes

    def borrow(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix, now owned by the caller too."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
            num_owners = self._num_owners[block]
            if num_owners == 0:
                del self._cached[block]
                self.num_owned += 1
            self.num_shared += num_owners == 1
            self._num_owners[block] = num_owners + 1
        return blocks

    def publish(self, block: int, key: bytes) -> None:
        """An owned block holds all of this prefix's last block, for good. The first to say so is believed."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._num_owners.setdefault(block, 1)

    def forget(self, blocks: Iterable[int]) -> None:
        """What owned blocks hold may be wrong: nobody else shall find them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]

    def keys(self) -> Iterable[bytes]:
        """Prefixes that a request would find here."""
        return self._block_of.keys()

    def num_unique(self, blocks: Sequence[int]) -> int:
        """How many of a request's blocks would come free if it gave them."""
        if not self.num_shared:
            return len(blocks)
        num_owners = self._num_owners
        return sum([num_owners.get(block, 1) == 1 for block in blocks])

    def num_owners(self, block: int) -> int:
        """Of an owned block."""
        return self._num_owners.get(block, 1)

    # as any pool

    def take(self, count: int) -> list[int]:
        self._evict(count - len(self._free))
        return super().take(count)

    def take_one(self) -> int:
        if not self._free:
            self._evict(1)
        return super().take_one()

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._cached))):
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            del self._num_owners[block]
            self._free.append(block)

    def give(self, blocks: Sequence[int]) -> None:
        """One owner less. The last of a prefix goes first when it is evicted: what is left of it is of use."""
        if not self._num_owners:
            super().give(blocks)
            return
        for block in reversed(blocks):
            num_owners = self._num_owners.get(block)
            if num_owners is None:
                self.num_owned -= 1
                self._free.append(block)
            elif num_owners > 1:
                self._num_owners[block] = num_owners - 1
                self.num_shared -= num_owners == 2
            else:
                self._lose_last_owner(block)

    def _lose_last_owner(self, block: int) -> None:
        self.num_owned -= 1
        if block in self._key_of:
            self._num_owners[block] = 0
            self._cached[block] = None
        else:
            del self._num_owners[block]
            self._free.append(block)

    def fence(self, request_id: RequestId, blocks: Sequence[int]) -> None:
        """As in any pool; those that others may own too stay owned, the fence in place of the request."""
        super().fence(request_id, blocks)
        num_known = sum([block in self._num_owners for block in blocks])
        self._num_fenced -= num_known
        self.num_owned += num_known

    def lift_fence(self, request_id: RequestId) -> None:
        blocks = self._fenced.pop(request_id)
        num_fenced = sum([block not in self._num_owners for block in blocks])
        self._num_fenced -= num_fenced
        self.num_owned += num_fenced
        self.give(blocks)

    # books

    def check_books(self, owners: Mapping[RequestId, Iterable[int]]) -> None:
        """Raises BrokenBooks unless each block has one place, each known one as many owners as it counts, and each key
        its block.
        """
        known = self._num_owners
        held = Counter(b for blocks in (*owners.values(), *self._fenced.values()) for b in blocks if b in known)
        for block, num_owners in known.items():
            if held[block] != num_owners:
                raise BrokenBooks(f"{self.name} pool: block {block} has {held[block]} owners and counts {num_owners}")
        if sum(num_owners > 1 for num_owners in known.values()) != self.num_shared:
            raise BrokenBooks(f"{self.name} pool: {self.num_shared} blocks are said to be shared")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise BrokenBooks(f"{self.name} pool: a key does not name the block that has it")
        super().check_books({i: [block for block in blocks if block not in known] for i, blocks in owners.items()})

    def _places(self, owners: Mapping[RequestId, Iterable[int]]) -> Iterable[tuple[str, Iterable[int]]]:
        known = self._num_owners
        for label, blocks in super()._places(owners):
            yield label, [block for block in blocks if block not in known]
        yield "cached", self._cached
        yield "shared", [block for block, num_owners in known.items() if num_owners]


class Giving:
    """What comes free when several requests give their blocks in the same step: a shared one does with its last owner.

    Always: each request takes part at most once.
    """

    def __init__(self, pool: PrefixPool) -> None:
        self._pool = pool
        self._num_givers: Counter[int] = Counter()

    def gain(self, blocks: Sequence[int]) -> int:
        """How many more would come free with these too."""
        if not self._pool.num_shared:
            return len(blocks)
        return sum([self._pool.num_owners(block) - self._num_givers[block] == 1 for block in blocks])

    def loss(self, blocks: Sequence[int]) -> int:
        """How many fewer would come free without these."""
        if not self._pool.num_shared:
            return len(blocks)
        return sum([self._pool.num_owners(block) == self._num_givers[block] for block in blocks])

    def add(self, blocks: Sequence[int]) -> None:
        if self._pool.num_shared:
            self._num_givers.update(blocks)

    def remove(self, blocks: Sequence[int]) -> None:
        if self._pool.num_shared:
            self._num_givers.subtract(blocks)
