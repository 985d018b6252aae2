"""Whom overload refuses first: the lower the value, the sooner the door closes.

Knows values of one class seen of late; refuses to know deadlines and queues. The rule is trunk reservation: who is
worth most may find the whole of its time taken up by the work ahead, who is worth least half of it. So the queue fills
up to the share of the lowest value, and what comes on top of that finds room only from the next value on. Those who
come back when told to come before all but the dearest.
"""

from __future__ import annotations

ONE = 1_024
_SEEN_US = 10_000_000
_LEAST = ONE // 2
_BESIDE_RETURNS = ONE * 7 // 8
_OF_RETURNS = ONE * 15 // 16


class ValueLevels:
    """The values asked for in the last ten seconds. Always: one level alone has the whole of its time, less what is
    kept for those who come back.
    """

    def __init__(self) -> None:
        self._seen_us: dict[int, int] = {}

    def note(self, value_micros: int, now_us: int) -> None:
        self._seen_us[value_micros] = now_us

    def share(self, value_micros: int, *, has_returns: bool, is_return: bool, now_us: int) -> int:
        """The part of its time that the work ahead of a newcomer may take up, in 1024ths. O(levels)."""
        for value, seen_us in list(self._seen_us.items()):
            if seen_us < now_us - _SEEN_US:
                del self._seen_us[value]
        num_below = sum(value < value_micros for value in self._seen_us)
        num_above = sum(value > value_micros for value in self._seen_us)
        if not num_above and (num_below or is_return):
            return ONE
        if is_return:
            return _OF_RETURNS
        if not num_above:
            return share_of_equals(has_returns=has_returns)
        return _LEAST + (_BESIDE_RETURNS - _LEAST) * num_below // (num_below + num_above)


def share_of_equals(*, has_returns: bool) -> int:
    """The share of everybody where all are worth the same."""
    return _BESIDE_RETURNS if has_returns else ONE
