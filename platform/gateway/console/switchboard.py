"""What an operator says to a worker: drain, and why did this request wait. Knows messages; refuses to know pages."""

from __future__ import annotations

import asyncio

from wire.bus import BusError, GatewayBus
from wire.messages import Drain, Explain, Explained

ANSWER_LIMIT_S = 3.0
MOST_WAITING = 32


class Switchboard:
    """Always: at most MOST_WAITING questions are open; each is answered, timed out or cancelled, and then forgotten."""

    def __init__(self) -> None:
        self._bus: GatewayBus | None = None
        self._waiting: dict[tuple[str, int], list[asyncio.Future[Explained]]] = {}

    def connect(self, bus: GatewayBus | None) -> None:
        """The runtime calls this with its Bus at its start and with None at its end."""
        self._bus = bus

    async def drain(self, worker_id: str, epoch: int, actor: str) -> None:
        """Raises BusError; the worker was not told then."""
        await self._open_bus().send(worker_id, Drain(worker_epoch=epoch, actor=actor))

    async def explain(
        self, worker_id: str, response_id: str, choice: int = 0, limit_s: float = ANSWER_LIMIT_S
    ) -> Explained | None:
        """None where the worker does not answer in time. Raises BusError."""
        bus = self._open_bus()
        if sum(map(len, self._waiting.values())) >= MOST_WAITING:
            raise BusError("too many questions are open; ask again in a moment")
        key = (response_id, choice)
        answer: asyncio.Future[Explained] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(answer)
        try:
            await bus.send(worker_id, Explain(gateway_id=bus.gateway_id, response_id=response_id, choice=choice))
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            return None
        finally:
            self._waiting[key].remove(answer)
            if not self._waiting[key]:
                del self._waiting[key]

    def hear(self, message: Explained) -> None:
        """An answer from the outbox; one that nobody waits for any more is dropped."""
        for answer in self._waiting.get((message.response_id, message.choice), ()):
            if not answer.done():
                answer.set_result(message)

    def _open_bus(self) -> GatewayBus:
        if self._bus is None:
            raise BusError("this gateway has no Bus open")
        return self._bus


switchboard = Switchboard()
