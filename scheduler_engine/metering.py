"""What each step costs those who decode in it, without touching them: cumulative prices, read when somebody asks.

Knows prices and token counts; refuses to know requests and tenants.
"""

from __future__ import annotations

UNIT_BITS = 40
UNITS_PER_US = 1 << UNIT_BITS  # a charge is in these, so that a step can be split without losing anything


class Meter:
    """The cumulative price of a decode row: one over ``total`` known tokens pays ``row + token * total`` for a step.

    While it gets a row in every step its total grows with the clock, so ``offset = total - clock`` stays what it is,
    and between two readings it owes the growth of ``per_row`` plus ``offset`` times the growth of ``per_token``.
    """

    __slots__ = ("clock", "per_row", "per_token")

    def __init__(self) -> None:
        self.clock = 0  # steps with decodes so far
        self.per_row = 0
        self.per_token = 0

    def price(self, row_units: int, token_units: int) -> None:
        """What a row, and each token it attends to, cost in the step that has just been made."""
        self.per_row += row_units + token_units * self.clock
        self.per_token += token_units


class Tab:
    """What a tenant or a request has to pay. Always: ``charged`` is exact, whenever and however often it is read.

    While its rows stay the same it is a straight line in the meter's two prices; when one comes or goes, ``_base``
    moves by what the meter shows of it, so that nothing jumps.
    """

    __slots__ = ("_base", "_num_rows", "_offsets", "meter")

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._base = 0  # where the line starts: may be negative
        self._num_rows = 0
        self._offsets = 0  # sum over its rows

    @property
    def charged(self) -> int:
        """In units, so far."""
        meter = self.meter
        return self._base + self._num_rows * meter.per_row + self._offsets * meter.per_token

    def charge(self, units: int) -> None:
        """Something else than a decode row."""
        self._base += units

    def open(self, offset: int) -> None:
        """From the next step on a row with this offset is on the tab."""
        self._base -= self.meter.per_row + offset * self.meter.per_token
        self._num_rows += 1
        self._offsets += offset

    def close(self, offset: int) -> None:
        """That row is not any more."""
        self._base += self.meter.per_row + offset * self.meter.per_token
        self._num_rows -= 1
        self._offsets -= offset
