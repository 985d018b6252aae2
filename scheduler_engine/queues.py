"""Who waits, in which order: per class the fairest tenant first, inside a tenant the oldest promise.

Knows order keys; refuses to know whether the head fits.
"""

from __future__ import annotations

import heapq

from scheduler_engine.errors import BrokenBooks
from scheduler_engine.fairness import Account
from scheduler_engine.live import LiveRequest

_Key = tuple[int, int, int, int]
_MIN_TO_COMPACT = 64


class TenantLine:
    """Waiting requests of one (class, tenant). Always: entries whose ticket is not their request's are dead and
    skipped.
    """

    __slots__ = ("_heap", "account", "is_parked", "num_waiting", "version", "waiting_us")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.num_waiting = 0
        self.waiting_us = 0  # estimated device time of all that wait here
        self.is_parked = False  # its tenant runs as many as it may; out of the class order until one ends
        self.version = 0  # of this line's entry in the class order; other entries are dead
        self._heap: list[tuple[_Key, int, LiveRequest]] = []

    def push(self, live: LiveRequest) -> None:
        live.ticket += 1
        heapq.heappush(self._heap, (live.order_key, live.ticket, live))
        self.num_waiting += 1
        self.waiting_us += live.estimated_gpu_us

    def remove(self, live: LiveRequest) -> None:
        """O(1): its entry dies; half dead, the heap is rebuilt."""
        live.ticket += 1
        self.num_waiting -= 1
        self.waiting_us -= live.estimated_gpu_us
        if len(self._heap) > _MIN_TO_COMPACT and self.num_waiting * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)

    def head(self) -> LiveRequest | None:
        """O(1), plus the dead entries it drops on the way."""
        heap = self._heap
        while heap:
            _, ticket, live = heap[0]
            if ticket == live.ticket:
                return live
            heapq.heappop(heap)
        return None

    def waiting(self) -> list[LiveRequest]:
        """All of them, in heap order. O(n): for books and boards."""
        return [live for _, ticket, live in self._heap if ticket == live.ticket]


class ClassQueue:
    """All waiting and suspended requests of one class. Always: ``head`` is the oldest promise of the tenant with the
    least weighted device time among those with a head.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.waiting_us = 0
        self.parked_us = 0  # of ``waiting_us``: of tenants that a cap of their own holds back
        self._us_of_value: dict[int, int] = {}  # estimated device time of what waits, by its value
        self._lines: dict[Account, TenantLine] = {}
        self._num_versions = 0
        self.line_changes: list[tuple[Account, bool]] = []  # out of the order (True) or back in it, for the journal
        self._heap: list[tuple[int, _Key, int, TenantLine]] = []
        self._first: TenantLine | None = None  # the last head's, until a line comes, goes or has another head

    def push(self, live: LiveRequest) -> None:
        """O(log waiting of the tenant)."""
        line = self._lines.get(live.account)
        if line is None:
            line = self._lines[live.account] = TenantLine(live.account)
        line.push(live)
        self.num_waiting += 1
        self.waiting_us += live.estimated_gpu_us
        if line.is_parked:
            self.parked_us += live.estimated_gpu_us
        value = live.request.value_micros
        self._us_of_value[value] = self._us_of_value.get(value, 0) + live.estimated_gpu_us
        if line.head() is live:
            self._list(line, live)

    def remove(self, live: LiveRequest) -> None:
        """Out of the order: admitted, ended or set aside. O(1) amortised, O(log) when it was a head."""
        line = self._lines[live.account]
        was_head = line.head() is live
        line.remove(live)
        self.num_waiting -= 1
        self.waiting_us -= live.estimated_gpu_us
        if line.is_parked:
            self.parked_us -= live.estimated_gpu_us
        value = live.request.value_micros
        self._us_of_value[value] -= live.estimated_gpu_us
        if not self._us_of_value[value]:
            del self._us_of_value[value]
        if not was_head:
            return
        self._unlist(line)
        new_head = line.head()
        if new_head is not None:
            self._list(line, new_head)
        else:
            self._park(line, False)
            del self._lines[live.account]

    def head(self) -> LiveRequest | None:
        """O(1) amortised. A tenant charged since it was listed sinks to its new place."""
        heap = self._heap
        while heap:
            service, key, version, line = heap[0]
            if version != line.version:
                heapq.heappop(heap)
            elif service != (charged := line.account.service):
                heapq.heapreplace(heap, (charged, key, version, line))
            elif key[0] and line.account.at_concurrency:
                heapq.heappop(heap)
                self._unlist(line)
                self._park(line, True)
            else:
                self._first = line
                return line.head()
        return None

    def last_head(self) -> LiveRequest | None:
        """Who was the head when last asked, if nothing but service has changed since; nobody sinks. O(1)."""
        return None if self._first is None else self._first.head()

    @property
    def least_service(self) -> int:
        """No tenant in the order has had less. O(1): where charges have come since, it may be too low."""
        return self._heap[0][0] if self._heap else 0

    def is_parked(self, account: Account) -> bool:
        """True while a cap of its own holds the tenant back, though somebody of it waits."""
        line = self._lines.get(account)
        return line is not None and line.is_parked

    def tenants(self) -> list[Account]:
        """With somebody who waits."""
        return list(self._lines)

    def park(self, account: Account) -> None:
        """Out of the order if a cap of its own holds the tenant's next one back; one that has begun may go on."""
        line = self._lines.get(account)
        head = None if line is None else line.head()
        if line is not None and head is not None and head.order_key[0] and account.at_concurrency:
            self._unlist(line)
            self._park(line, True)

    def unpark(self, account: Account) -> None:
        """Back into the order, until its cap is found to hold it still."""
        line = self._lines[account]
        if (head := line.head()) is not None:
            self._list(line, head)

    def unlist(self, account: Account) -> None:
        """Out of the order until ``relist``, in the same step: the tenant's turn is over."""
        self._unlist(self._lines[account])

    def relist(self, account: Account) -> None:
        """Back in the order, if somebody of the tenant still waits."""
        line = self._lines.get(account)
        head = None if line is None else line.head()
        if line is not None and head is not None and not line.is_parked:
            self._list(line, head)

    def forget_first(self) -> None:
        """The caps may have changed: who is the head has to be looked up."""
        self._first = None

    @property
    def ready_us(self) -> int:
        """Estimated device time of what waits for the device alone."""
        return self.waiting_us - self.parked_us

    def is_in_order(self, account: Account) -> bool:
        """True while somebody of the tenant waits and no cap of its own holds the tenant back."""
        line = self._lines.get(account)
        return line is not None and not line.is_parked

    def num_waiting_of(self, account: Account) -> int:
        line = self._lines.get(account)
        return 0 if line is None else line.num_waiting

    def waiting_us_of(self, account: Account) -> int:
        line = self._lines.get(account)
        return 0 if line is None else line.waiting_us

    def accounts(self) -> list[Account]:
        """Tenants with somebody who waits and whom no cap of their own holds back."""
        return [line.account for line in self._lines.values() if not line.is_parked]

    def waiting_us_above(self, value_micros: int) -> int:
        """Estimated device time of what waits and is worth more. O(values that wait)."""
        above_us = 0
        for value, us in self._us_of_value.items():
            if value > value_micros:
                above_us += us
        return above_us

    def waiting(self) -> list[LiveRequest]:
        """All of them, tenant by tenant. O(n): for books and boards."""
        return [live for line in self._lines.values() for live in line.waiting()]

    def _unlist(self, line: TenantLine) -> None:
        """Its entry in the class order dies. Versions are unique in the class: entries never compare further."""
        self._num_versions += 1
        line.version = self._num_versions
        self._first = None

    def _park(self, line: TenantLine, is_parked: bool) -> None:
        if line.is_parked != is_parked:
            line.is_parked = is_parked
            self.parked_us += line.waiting_us if is_parked else -line.waiting_us
            self.line_changes.append((line.account, is_parked))

    def _list(self, line: TenantLine, head: LiveRequest) -> None:
        self._unlist(line)
        self._park(line, False)
        heapq.heappush(self._heap, (line.account.service, head.order_key, line.version, line))

    def check_books(self) -> None:
        """Raises BrokenBooks unless counts and estimated times are those of the requests that wait."""
        waiting = self.waiting()
        if len(waiting) != self.num_waiting:
            raise BrokenBooks(f"queue says {self.num_waiting} wait, {len(waiting)} do")
        waiting_us = sum(live.estimated_gpu_us for live in waiting)
        if waiting_us != self.waiting_us or waiting_us != sum(line.waiting_us for line in self._lines.values()):
            raise BrokenBooks(f"queue says {self.waiting_us} us wait, {waiting_us} us do")
        if sum(line.waiting_us for line in self._lines.values() if line.is_parked) != self.parked_us:
            raise BrokenBooks(f"queue says {self.parked_us} us wait for caps of their own")
        if sum(self._us_of_value.values()) != waiting_us:
            raise BrokenBooks(f"queue says {self._us_of_value} us wait by value, {waiting_us} us do")
