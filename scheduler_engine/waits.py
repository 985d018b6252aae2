"""Where the time of a request that does not run goes: each microsecond to one cause.

Knows who stands where in line, and since when; refuses to know why a head is blocked. Nothing here is done per step or
per waiting request: a class's line has one head, time is booked when its cause changes, and a request reads off what
its tenant's line and its class's line went through while it stood in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from scheduler_engine.events import Wait
from scheduler_engine.fairness import Account
from scheduler_engine.policy import PriorityClass
from scheduler_engine.record import Cause

_HOLDERS = len(PriorityClass) + 1


class WaitShare(NamedTuple):
    """Time lost to one cause. ``holder``: the class that held what was missing, None where that means nothing."""

    cause: Cause
    holder: PriorityClass | None
    duration_us: int


def share_key(cause: int, holder: int) -> int:
    """``holder``: 1 + rank, or 0."""
    return cause * _HOLDERS + holder


_HOLDER_LABELS = ("", *(priority_class.label for priority_class in PriorityClass))
_LABELS = {
    share_key(cause, holder): (cause.label, label) for cause in Cause for holder, label in enumerate(_HOLDER_LABELS)
}


class WaitLog:
    """The waits of one request. Always: shares of closed waits sum to their lengths, exactly.

    ``queued`` is before its first start, ``paused`` after; keys are ``share_key``. A request in a slot that gets no
    part of a step waits too (``idle_since_us``).
    """

    __slots__ = (
        "direct_us",
        "has_started",
        "head_mark_us",
        "idle_cause",
        "idle_since_us",
        "last_record",
        "parked_mark_us",
        "paused",
        "queued",
        "since_us",
    )

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.paused: dict[int, int] = {}
        self.has_started = False
        self.since_us: int | None = None  # in line since
        self.head_mark_us = 0  # what its tenant's clocks showed when it came into line
        self.parked_mark_us = 0
        self.direct_us = 0  # of the present wait, as the head of its class
        self.idle_since_us: int | None = None
        self.idle_cause = 0
        self.last_record = 0  # number of the newest record about it

    def add(self, key: int, duration_us: int) -> None:
        shares = self.paused if self.has_started else self.queued
        shares[key] = shares.get(key, 0) + duration_us

    def told(self) -> tuple[Wait, ...]:
        """What has been booked, as values for the world."""
        waits = [Wait("queued", *_LABELS[key], duration_us) for key, duration_us in _ordered(self.queued)]
        waits += [Wait("paused", *_LABELS[key], duration_us) for key, duration_us in _ordered(self.paused)]
        return tuple(waits)

    def copy(self) -> WaitLog:
        other = WaitLog()
        for name in WaitLog.__slots__:
            setattr(other, name, getattr(self, name))
        other.queued, other.paused = dict(self.queued), dict(self.paused)
        return other


def shares_of(shares: Mapping[int, int]) -> tuple[WaitShare, ...]:
    """Largest first; of equals the one with the lower cause."""
    return tuple(
        WaitShare(
            Cause(key // _HOLDERS),
            PriorityClass(key % _HOLDERS - 1) if key % _HOLDERS else None,
            duration_us,
        )
        for key, duration_us in _ordered(shares)
    )


def _ordered(shares: Mapping[int, int]) -> list[tuple[int, int]]:
    """(key, duration): largest first; of equals the one with the lower cause."""
    if not shares:
        return []
    return [(key, -negative) for negative, key in sorted([(-us, key) for key, us in shares.items() if us])]


class _LineClock:
    """One tenant's line in a class: how long it stood first and blocked, and how long it was out of the order."""

    __slots__ = ("head_since_us", "head_us", "parked_since_us", "parked_us")

    def __init__(self) -> None:
        self.head_us = 0
        self.head_since_us: int | None = None
        self.parked_us = 0
        self.parked_since_us: int | None = None

    def head_at(self, now_us: int) -> int:
        return self.head_us if self.head_since_us is None else self.head_us + now_us - self.head_since_us

    def parked_at(self, now_us: int) -> int:
        return self.parked_us if self.parked_since_us is None else self.parked_us + now_us - self.parked_since_us


class _Blame:
    """Why a class's line does not move. ``log`` is the head's, None once the head has gone."""

    __slots__ = ("account", "clock", "key", "log", "since_us")

    def __init__(self, account: Account, clock: _LineClock, log: WaitLog, key: int, since_us: int) -> None:
        self.account = account
        self.clock = clock
        self.log: WaitLog | None = log
        self.key = key
        self.since_us = since_us


class WaitBook:
    """All lines. Always: a tenant's line is first, parked or behind another tenant, one of them at a time; times that
    are handed in never go back.
    """

    def __init__(self) -> None:
        self._clocks: dict[Account, _LineClock] = {}
        self._blames: list[_Blame | None] = [None for _ in PriorityClass]

    # lines

    def is_blamed(self, rank: int, log: WaitLog, cause: int) -> bool:
        """True when this head is blocked already, and by the same cause."""
        blame = self._blames[rank]
        return blame is not None and blame.log is log and blame.key // _HOLDERS == cause

    def block(self, account: Account, log: WaitLog, key: int, now_us: int) -> None:
        """From now on this request is the head of its class and does not start."""
        self._close(int(account.priority_class), now_us)
        clock = self._clock(account)
        clock.head_since_us = now_us
        self._blames[account.priority_class] = _Blame(account, clock, log, key, now_us)

    def _close(self, rank: int, now_us: int) -> None:
        blame = self._blames[rank]
        if blame is None:
            return
        self._book_head(blame, now_us)
        blame.clock.head_us = blame.clock.head_at(now_us)
        blame.clock.head_since_us = None
        self._blames[rank] = None

    @staticmethod
    def _book_head(blame: _Blame, now_us: int) -> None:
        if blame.log is not None:
            duration_us = now_us - blame.since_us
            blame.log.add(blame.key, duration_us)
            blame.log.direct_us += duration_us

    def park(self, account: Account, now_us: int) -> None:
        """The tenant's line is out of the order: it runs as many as it may."""
        blame = self._blames[account.priority_class]
        if blame is not None and blame.account is account:
            self._close(int(account.priority_class), now_us)
        clock = self._clock(account)
        if clock.parked_since_us is None:
            clock.parked_since_us = now_us

    def unpark(self, account: Account, now_us: int) -> None:
        clock = self._clock(account)
        clock.parked_us = clock.parked_at(now_us)
        clock.parked_since_us = None

    def _clock(self, account: Account) -> _LineClock:
        clock = self._clocks.get(account)
        if clock is None:
            clock = self._clocks[account] = _LineClock()
        return clock

    # requests

    def begin(self, account: Account, log: WaitLog, now_us: int) -> None:
        """Into line."""
        log.since_us = now_us
        log.direct_us = 0
        clock = self._clocks.get(account)
        if clock is not None:
            log.head_mark_us = clock.head_at(now_us)
            log.parked_mark_us = clock.parked_at(now_us)

    def end(self, account: Account, log: WaitLog, now_us: int) -> None:
        """Out of line: started or ended. The line itself stays where it was until somebody else is its head."""
        blame = self._blames[account.priority_class]
        if blame is not None and blame.log is log:
            self._book_head(blame, now_us)
            blame.log = None
        self._book_rest(account, log, now_us)
        log.since_us = None

    def _book_rest(self, account: Account, log: WaitLog, now_us: int) -> None:
        """What it was not itself the head for: its tenant's line was first, or parked, or another tenant's was."""
        if log.since_us is None:
            return
        clock = self._clocks.get(account)
        head_us = 0 if clock is None else clock.head_at(now_us) - log.head_mark_us
        parked_us = 0 if clock is None else clock.parked_at(now_us) - log.parked_mark_us
        others_us = now_us - log.since_us - head_us - parked_us
        for cause, duration_us in (
            (Cause.OWN_TENANT, head_us - log.direct_us),
            (Cause.CONCURRENCY, parked_us),
            (Cause.OTHER_TENANT, others_us),
        ):
            if duration_us:
                log.add(share_key(cause, 0), duration_us)

    def idle(self, log: WaitLog, key: int, now_us: int) -> None:
        """Keeps its slot, or copies out, and gets nothing until ``busy``."""
        if log.idle_since_us is None:
            log.idle_since_us = now_us
            log.idle_cause = key

    def busy(self, log: WaitLog, now_us: int) -> None:
        if log.idle_since_us is not None:
            log.add(log.idle_cause, now_us - log.idle_since_us)
            log.idle_since_us = None

    def until(self, account: Account, log: WaitLog, now_us: int) -> WaitLog:
        """A copy of the log with the present wait booked up to ``now_us``."""
        copy = log.copy()
        self.busy(copy, now_us)
        blame = self._blames[account.priority_class]
        if blame is not None and blame.log is log:
            copy.add(blame.key, now_us - blame.since_us)
            copy.direct_us += now_us - blame.since_us
        self._book_rest(account, copy, now_us)
        return copy
