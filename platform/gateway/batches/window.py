"""How many lines may be under way: what the workers can use soon, shared fairly between tenants, within their caps.

Knows load snapshots and counts; refuses to know batches and what a line asks. The engine orders what is let in.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from gateway.dispatch import class_row
from scheduler_engine.policy import PriorityClass
from wire.messages import LoadSnapshot

ROWS_PER_SLOT = 2  # under way: what runs, and as much again that waits for a row


class Window:
    """Always: under way are at most ROWS_PER_SLOT lines for each slot of an open worker, and of one tenant its cap.

    Tenants take turns. ``concurrency`` gives a tenant's cap in the batch class; None = no cap.
    """

    def __init__(
        self,
        loads: Callable[[], Sequence[LoadSnapshot]],
        concurrency: Callable[[str], int | None],
        clock_s: Callable[[], float],
    ) -> None:
        self._loads = loads
        self._concurrency = concurrency
        self._clock_s = clock_s
        self._seen: Sequence[LoadSnapshot] = ()
        self._num_started = 0  # since the snapshots that were seen last
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: deque[str] = deque()  # tenants that wait, next first
        self._paused_until_s: dict[str, float] = {}

    @property
    def num_under_way(self) -> int:
        return self._under_way.total()

    async def take(self, tenant_id: str) -> None:
        """Wait for a place. ``give`` follows exactly once."""
        place = asyncio.get_running_loop().create_future()
        if tenant_id not in self._waiting:
            self._waiting[tenant_id] = deque()
            self._turns.append(tenant_id)
        self._waiting[tenant_id].append(place)
        self.look()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give(tenant_id)
            raise

    def give(self, tenant_id: str) -> None:
        self._under_way[tenant_id] -= 1
        self.look()

    def pause(self, tenant_id: str, seconds: float) -> None:
        """The platform has told this tenant to come back later."""
        until_s = self._clock_s() + seconds
        self._paused_until_s[tenant_id] = max(until_s, self._paused_until_s.get(tenant_id, until_s))

    def look(self) -> None:
        """Hand out what there is; called again whenever something may have changed."""
        room = self._room()
        num_passed_over = 0
        while room > 0 and num_passed_over < len(self._turns):
            tenant_id = self._turns.popleft()
            if self._has_turn(tenant_id):
                self._waiting[tenant_id].popleft().set_result(None)
                self._under_way[tenant_id] += 1
                self._num_started += 1
                room -= 1
                num_passed_over = 0
            else:
                num_passed_over += 1
            if self._waiting[tenant_id]:
                self._turns.append(tenant_id)
            else:
                del self._waiting[tenant_id]

    def _has_turn(self, tenant_id: str) -> bool:
        waiting = self._waiting[tenant_id]
        while waiting and waiting[0].done():  # gave up waiting
            waiting.popleft()
        if not waiting or self._clock_s() < self._paused_until_s.get(tenant_id, 0.0):
            return False
        cap = self._concurrency(tenant_id)
        return cap is None or self._under_way[tenant_id] < cap

    def _room(self) -> int:
        loads = self._loads()
        if loads is not self._seen:
            self._seen, self._num_started = loads, 0
        rows = [(load, class_row(load, PriorityClass.BATCH)) for load in loads if load.ready and not load.draining]
        opened = [(load, row) for load, row in rows if not row.closed]
        most = sum(ROWS_PER_SLOT * load.num_slots for load, _ in opened) - self.num_under_way
        soon = sum(max(0, load.num_slots - row.num_waiting) for load, row in opened) - self._num_started
        return min(most, soon)
