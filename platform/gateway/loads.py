"""Where /metrics and the live page find the workers' newest LoadSnapshots, what the settler found in the books, and how
old is what this gateway decides by, whichever Bus this process has open.

Knows callables, set by the gateway's runtime when it opens its Bus; refuses to know which Bus that is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from wire.bus import BusError
from wire.messages import LoadSnapshot

Loads = Callable[[], Awaitable[Sequence[LoadSnapshot]]]


class LoadSource:
    """Always: reads from the callable given last, and raises BusError while there is none."""

    def __init__(self) -> None:
        self._read: Loads | None = None

    def read_from(self, loads: Loads | None) -> None:
        """The runtime calls this with ``bus.loads`` at its start and with None at its end."""
        self._read = loads

    async def __call__(self) -> Sequence[LoadSnapshot]:
        if self._read is None:
            raise BusError("this gateway has no Bus open")
        return await self._read()


class BooksSource:
    """What the last comparison of the books said; None while none is known."""

    def __init__(self) -> None:
        self.newest: dict[str, object] | None = None


class AgeSource:
    """Seconds since each of the things that this gateway decides by was last confirmed; nothing while it does not run.

    Always: asked anew at each call.
    """

    def __init__(self) -> None:
        self._read: Mapping[str, Callable[[], float]] = {}

    def read_from(self, ages: Mapping[str, Callable[[], float]]) -> None:
        self._read = ages

    def __call__(self) -> dict[str, float]:
        return {what: age_s() for what, age_s in self._read.items()}


loads = LoadSource()
books = BooksSource()
ages = AgeSource()
