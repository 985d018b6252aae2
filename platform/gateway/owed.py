"""What this gateway still owes the books: ends of responses that Redis has not confirmed.

An admission whose answer was lost may have let in a response that nobody knows of; a release that was not answered may
not have arrived. Both are looked at again when Redis answers. Knows ids and owners; refuses to end what is served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.ownership import Ownership
from wire.bus import GatewayBus
from wire.messages import Released

log = logging.getLogger(__name__)

LATE_S = 10.0  # a call that was given up may still arrive so long after Redis has answered again
MAX_AT_ONCE = 500


@dataclass(slots=True)
class _Debt:
    """``due_s``: when it is looked at next; ``is_last``: and then never again."""

    released: Released
    due_s: float
    is_last: bool = False


class Owed:
    """Always: a response that this gateway let in, and does not serve, is released while the gateway lives."""

    def __init__(
        self,
        bus: GatewayBus,
        ownership: Ownership,
        is_served: Callable[[str], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._ownership = ownership
        self._is_served = is_served
        self._clock_s = clock_s
        self._debts: dict[str, _Debt] = {}

    def __len__(self) -> int:
        return len(self._debts)

    def note(self, response_id: str, tenant_id: str, reason: str) -> None:
        released = Released(response_id=response_id, tenant_id=tenant_id, reason=reason)
        self._debts[response_id] = _Debt(released, self._clock_s())

    def forget(self, response_id: str) -> None:
        """It is asked for once more: that call will say what has become of it."""
        self._debts.pop(response_id, None)

    async def pay(self) -> None:
        """Looks at each that is due. Raises BusError: then all of them are due still."""
        now_s = self._clock_s()
        due = [name for name, debt in self._debts.items() if debt.due_s <= now_s][:MAX_AT_ONCE]
        if not due:
            return
        for name, owner in zip(due, await self._ownership.owners(due), strict=True):
            debt = self._debts.get(name)
            if debt is None:
                continue  # it was asked for once more meanwhile
            if owner is not None and owner.is_open and self._is_mine(name, owner.gateway_id):
                await self._bus.append_usage(debt.released)
                log.warning("response %s was let in without our knowing, and is released", name)
                self._debts.pop(name, None)
            elif debt.is_last:
                del self._debts[name]
            else:
                debt.due_s, debt.is_last = now_s + LATE_S, True

    def _is_mine(self, response_id: str, gateway_id: str) -> bool:
        return gateway_id == self._bus.gateway_id and not self._is_served(response_id)
