"""What is served here is this gateway's own: its leases are renewed, and what others have taken is let go.

A process that sleeps past its heartbeat is taken for dead. When it goes on it serves what may have moved, or ended,
meanwhile; nobody told it, so it asks. Knows streams and their records; refuses to know who reads.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.admission import Admission, Standing
from gateway.continuity import lost_by, take_all
from gateway.ownership import Ownership
from gateway.response_stream import End, Lost, ResponseStream
from gateway.streams import MOVED, Streams
from wire.bus import GatewayBus


class Holding:
    """Always: after a look nothing is served here that is another gateway's, nor what had ended at the look before."""

    def __init__(self, *, bus: GatewayBus, admission: Admission, streams: Streams, ownership: Ownership) -> None:
        self._bus = bus
        self._admission = admission
        self._streams = streams
        self._ownership = ownership
        self._ended: frozenset[str] = frozenset()

    async def renew(self) -> None:
        """One look at all that goes on here. Raises BusError.

        The end of what ended here lies in the outbox, and is read with its log probabilities: it has until the next
        look, and is then taken for lost.
        """
        streams = [stream for stream in self._streams if stream.end is None]
        grants = [stream.grant if stream.holds_lease else replace(stream.grant, lease_key="") for stream in streams]
        found = await self._admission.renew(self._bus.gateway_id, grants)
        ended_before, self._ended = self._ended, frozenset()
        for stream, state in zip(streams, found, strict=True):
            is_late = state is Standing.ENDED and stream.response_id in ended_before
            if state is Standing.ANOTHERS or is_late:
                await self._let_go(stream)
            elif state is Standing.ENDED:
                self._ended |= {stream.response_id}

    async def _let_go(self, stream: ResponseStream) -> None:
        """Who still reads it here is given what is left of it where it has ended, else told to come again."""
        owner = await self._ownership.owner(stream.response_id)
        if owner is None or (owner.is_open and owner.gateway_id == self._bus.gateway_id):
            return  # it came back meanwhile
        output = await self._bus.output(stream.response_id)
        if stream.end is not None:
            return
        end: End
        if output is not None:
            take_all(stream, output)
            end = output.finished
        else:
            end = Lost(MOVED) if owner.is_open else lost_by(owner)
        self._streams.let_go(stream, end)
