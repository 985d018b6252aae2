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
    """What a tenant or a request has to pay. Always: ``charged`` is exact, whenever and however often it is read."""

    __slots__ = ("_num_rows", "_offsets", "_per_row", "_per_token", "_settled", "meter")

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._settled = 0
        self._num_rows = 0
        self._offsets = 0  # sum over its rows
        self._per_row = 0
        self._per_token = 0

    @property
    def charged(self) -> int:
        """In units, so far."""
        if not self._num_rows:
            return self._settled
        meter = self.meter
        rows = self._num_rows * (meter.per_row - self._per_row)
        return self._settled + rows + self._offsets * (meter.per_token - self._per_token)

    def charge(self, units: int) -> None:
        """Something else than a decode row."""
        self._settled += units

    def open(self, offset: int) -> None:
        """From the next step on a row with this offset is on the tab."""
        self._settle()
        self._num_rows += 1
        self._offsets += offset

    def close(self, offset: int) -> None:
        """That row is not any more."""
        self._settle()
        self._num_rows -= 1
        self._offsets -= offset

    def _settle(self) -> None:
        self._settled = self.charged
        self._per_row = self.meter.per_row
        self._per_token = self.meter.per_token
