"""When it is worth coming back: times to return that are spaced by the work that will come back with them, and kept.

Knows appointments of one class; refuses to know why anybody was refused. Together they are a waiting room outside the
door: as long as a queue would have been, without its memory, and each in it knows his turn.
"""

from __future__ import annotations

from collections import deque

RETRY_MIN_US = 1_000_000
RETRY_MAX_US = 120_000_000  # the usual client library waits no longer
_NOT_SOON_US = 600_000_000  # what one is told who has no appointment: his client does not come back by itself
_GRACE_US = 15_000_000  # an appointment that nobody has kept by then is nobody's any more
_ONE = 1_024
_SPACING_FIRST = 4 * _ONE  # those who come back take a quarter of the device,
_SPACING_MIN = 2 * _ONE  # at most half of it where that proves not too much,
_SPACING_MAX = 64 * _ONE


class _Turns:
    """The appointments of one tenant, rising."""

    __slots__ = ("due", "next_us")

    def __init__(self) -> None:
        self.due: deque[int] = deque()
        self.next_us = 0


class ReturnBook:
    """Appointments of one class. Always: two of a tenant are as far apart as the earlier one's work takes, times the
    tenants that have any, times a spacing that grows by an eighth whenever an appointment was not kept or stood in the
    way of somebody dearer, and shrinks by a 128th whenever one was kept.
    """

    def __init__(self) -> None:
        self.num_kept = 0
        self.num_broken = 0
        self._spacing = _SPACING_FIRST
        self._last_us: int | None = None
        self._turns: dict[str, _Turns] = {}

    def has_open(self, now_us: int) -> bool:
        """True while somebody may still come back at a time he was told."""
        return self._last_us is not None and now_us <= self._last_us + _GRACE_US

    def appoint(self, tenant_id: str, *, wait_us: int, cost_us: int, salt: int, now_us: int) -> int:
        """Retry-After for one who was refused and would be served after ``wait_us``, with work of ``cost_us``.

        No appointment is further away than ``RETRY_MAX_US``. Who gets none is told ten minutes or more, spread: nothing
        is promised by it.
        """
        if not self.has_open(now_us):
            self._turns.clear()
        turns = self._turns.get(tenant_id)
        if turns is None:
            turns = self._turns[tenant_id] = _Turns()
        turns.next_us = max(turns.next_us, now_us + RETRY_MIN_US)
        at_us = max(now_us + wait_us, turns.next_us, turns.due[-1] if turns.due else 0)
        if at_us > now_us + RETRY_MAX_US:
            return spread(wait_us=_NOT_SOON_US, salt=salt)
        turns.next_us += cost_us * len(self._turns) * self._spacing // _ONE
        turns.due.append(at_us)
        self._last_us = at_us if self._last_us is None else max(self._last_us, at_us)
        return at_us - now_us

    def redeem(self, tenant_id: str, now_us: int) -> bool:
        """One of the tenant is back: True when an appointment is due, which is then used up. O(1) amortised."""
        turns = self._turns.get(tenant_id)
        if turns is None:
            return False
        due = turns.due
        while due and due[0] <= now_us - _GRACE_US:
            due.popleft()
        is_due = bool(due) and due[0] <= now_us
        if is_due:
            due.popleft()
        return is_due

    def note(self, *, is_kept: bool) -> None:
        """How an appointment turned out."""
        if is_kept:
            self.num_kept += 1
            self._spacing = max(_SPACING_MIN, self._spacing - self._spacing // 128)
        else:
            self.num_broken += 1
            self.thin_out()

    def thin_out(self) -> None:
        """Too many come back for what there is: the next appointments are further apart."""
        self._spacing = min(_SPACING_MAX, self._spacing + self._spacing // 8)


def spread(*, wait_us: int, salt: int) -> int:
    """``wait_us``, a second at least, and up to a quarter more: the same for the same salt."""
    base_us = max(RETRY_MIN_US, wait_us)
    return base_us + base_us * ((salt * 2_654_435_761 >> 8) % 256) // 1_024
